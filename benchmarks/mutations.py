"""Would the tests notice a wrong formula? Change one at a time in a copy of the package and run the part's tests.

    python benchmarks/mutations.py [--parts fedcm,fedsmoo]

Every line of `MUTATIONS` is a mistake that a reader could overlook: a sign, a factor, a term that is missing, a vector
of the wrong moment. A mutation that no test notices is printed, and the exit status is 1.
The last line is one JSON object with the number of mutations and of those that were caught, by part.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis  # noqa: F401  (slow to import, as torch is: once is enough for all forks)
import pytest
import torch  # noqa: F401

HOME = Path(__file__).resolve().parents[1]
FORMS = "tests/parts/conformance/test_later_closed_forms.py tests/parts/conformance/test_later_identities.py"
OTHER_TESTS = {
    "apfl": "tests/parts/personal/test_apfl.py",
    "fedadagrad": "tests/parts/conformance/test_closed_forms.py -k fedadagrad",
    "beside": "tests/parts/conformance/test_later_sums.py -k 'touch or path or displaced or follow'",
    "sums": "tests/parts/conformance/test_every_part.py -k famous",
}
PARTS, VIEWS = "fedflat/parts/", "fedflat/core/views.py"
MOMENTUM, DUAL, GLOBAL = f"{PARTS}global_momentum.py", f"{PARTS}dual_sam.py", f"{PARTS}global_sam.py"
KEPT, SKEW, SWA, RATES = (f"{PARTS}{name}.py" for name in ("distillation", "label_skew", "fedswa", "server_rates"))
INIT, IFCA, APFL, SUMS = (
    f"{PARTS}fedinit.py",
    f"{PARTS}personal/ifca.py",
    f"{PARTS}personal/apfl.py",
    f"{PARTS}named_sums.py",
)
MUTATIONS = (  # part, file, what is there, what is put in its place
    ("fedcm", MOMENTUM, 'local.received(self)["m"], alpha=1 - self.alpha', 'local.received(self)["m"], alpha=1.0'),
    ("fedcm", MOMENTUM, "local.grad.mul_(self.alpha).add_", "local.grad.add_"),
    ("fedcm", f"{PARTS}direction.py", "server.delta / -scale", "server.delta / scale"),
    ("fedacg", MOMENTUM, "server.theta.add(m, alpha=self.lam)", "server.theta.add(m)"),
    ("fedacg", MOMENTUM, 'state["m"] * self.lam + delta', 'state["m"] + delta'),
    ("fedacg", MOMENTUM, "local.theta - local.origin, alpha=self.beta", "local.theta, alpha=self.beta"),
    ("fedwmsam", MOMENTUM, "mul_(alpha / (1 - alpha))", "mul_(alpha)"),
    ("fedwmsam", MOMENTUM, 'local.scratch(self)["mixed"], local.steps)', 'local.scratch(self)["mixed"], 1)'),
    ("fedwmsam", MOMENTUM, "self._alpha(server) * (1 - self.rate)", "self._alpha(server)"),
    ("fedwmsam", MOMENTUM, "1 + cosine", "cosine"),
    ("fedwmsam", MOMENTUM, 'total["c"] / server.clients', 'total["c"] / server.participants'),
    ("fedsmoo", DUAL, "dual.add_(ascent).sub_(common)", "dual.add_(ascent)"),
    ("fedsmoo", DUAL, "torch.sub(local.grad, dual).sub_(common)", "torch.sub(local.grad, dual)"),
    ("fedsmoo", DUAL, "self.rho * unit(server.total", "unit(server.total"),
    ("fedsmoo", DUAL, 'dual - scratch["ascent"] if last else dual.clone()', "dual.clone()"),
    ("fedgloss", DUAL, 'server.participants if self.server == "paper" else 1', "server.participants"),
    ("fedgloss", DUAL, "t = round - 1", "t = round"),
    ("fedgloss", DUAL, "unit(d), alpha=radius", "unit(d), alpha=-radius"),
    ("fedgloss", DUAL, 'server.theta + delta + state["h"]', 'server.origin + delta + state["h"]'),
    ("fedgloss", DUAL, "1 / self.beta", "self.beta"),
    ("fedlesam", GLOBAL, "None if old is None else old - local.given", "None if old is None else local.given - old"),
    ("fedlesam", GLOBAL, 'local.state(self)["old"] = local.given', 'local.state(self)["old"] = local.theta'),
    ("fedlesam", GLOBAL, 'server.state(self)["old"] = server.origin', 'server.state(self)["old"] = server.theta'),
    ("fedgf", GLOBAL, "ascent.mul_(1 - c).add_", "ascent.add_"),
    ("fedgf", GLOBAL, "unit(last - server.origin)", "unit(server.origin - last)"),
    ("fedgf", GLOBAL, "self._distance(server) > self.threshold", "self._distance(server) < self.threshold"),
    ("fedgf", GLOBAL, "self.rho if self.rho_g is None else self.rho_g", "self.rho"),
    ("fedgf", GLOBAL, "window[window >= 0].mean()", "window.clamp_min(0).mean()"),
    ("fedsol", KEPT, " and not local.theta.equal(local.given)", ""),
    ("fedsol", KEPT, "logits / temperature, dim=1", "logits, dim=1"),
    ("fedsol", KEPT, "norm = tensor.norm(dim=0", "norm = tensor.norm(dim=-1"),
    ("fedswa", SWA, "(1 - self.rho) * step / steps", "(1 - self.rho) * step / max(1, steps - 1)"),
    ("fedswa", SWA, "server.theta.add(delta, alpha=self.alpha)", "server.theta.add(delta)"),
    ("fedswa", VIEWS, "self.weighted_steps + self.rate", "self.weighted_steps + 1"),
    ("fedmoswa", SWA, "local.weighted_steps)", "local.steps)"),
    ("fedmoswa", SWA, "common + (fresh - common) * self.gamma", "common + fresh * self.gamma"),
    ("fedmoswa", SWA, 'local.received(self)["c"] - own', 'own - local.received(self)["c"]'),
    ("fedmoswa", SWA, "local.full_gradient(local.given)", "local.full_gradient(local.theta)"),
    ("fedinit", INIT, "local.given - last, alpha", "last - local.given, alpha"),
    ("fedinit", INIT, 'local.state(self)["last"] = local.theta', 'local.state(self)["last"] = local.origin'),
    ("fedinit", INIT, "local.origin = local.theta.clone()", "pass"),
    ("fedexp", RATES, "common = 2 * (", "common = ("),
    ("fedexp", RATES, "max(1.0, mean / common)", "mean / common"),
    ("fedexp", RATES, "weight = 1.0 if local.uniform else local.samples", "weight = 1.0"),
    ("fedexp", RATES, "server.participants * (server.lr", "(server.lr"),
    ("fedexp", RATES, "(server.theta + last) / 2", "last"),
    ("qfedavg", RATES, "weight = loss**self.q", "weight = loss ** (self.q + 1)"),
    ("qfedavg", RATES, "square() / local.lr if", "square() * local.lr if"),
    ("qfedavg", RATES, "self.q * loss ** (self.q - 1)", "loss ** (self.q - 1)"),
    ("fedntd", KEPT, "others >= label", "others > label"),
    ("fedntd", KEPT, "self.beta * self.tau**2", "self.beta * self.tau"),
    (
        "fedntd",
        KEPT,
        "divergence(kept.gather(1, index), output.gather(1, index), tau)",
        "divergence(output.gather(1, index), kept.gather(1, index), tau)",
    ),
    ("fedlc", SKEW, "counts**-0.25", "counts**-0.5"),
    ("fedlc", SKEW, "self.tau * shift, -torch.inf)", "self.tau * shift, 0.0)"),
    ("fedlc", SKEW, ".sum() - plain", ".sum()"),
    ("fedlc", SKEW, "counts.log() if", "counts.sqrt() if"),
    ("feddecorr", SKEW, ".fill_diagonal_(0)", ""),
    ("feddecorr", SKEW, "f.var(0)", "f.var(0, unbiased=False)"),
    ("feddecorr", SKEW, "width * (width - 1)) * batch", "width * (width - 1))"),
    ("ifca", IFCA, ".argmin()", ".argmax()"),
    ("ifca", IFCA, "local.origin = local.given = models[choice].clone()", "local.theta.copy_(models[choice])"),
    ("ifca", IFCA, 'state["models"][1:] + moves[1:]', 'state["models"][1:]'),
    ("apfl", APFL, "alpha * output + (1 - alpha) * common", "alpha * output + common"),
    ("apfl", APFL, "slopes[0] + 0.02 * alpha", "slopes[0]"),
    ("apfl", APFL, "(towards * (output.detach() - common)).sum()", "(towards * output.detach()).sum()"),
    ("apfl", APFL, '"share": alpha', '"share": 1 - alpha'),
    ("fedadagrad", f"{PARTS}server_optimisers.py", '["m"] = m * self.beta1', '["m"] = m'),
    ("fedadagrad", f"{PARTS}server_optimisers.py", "if self.beta1 > 0:", "if False:"),
    ("fedadagrad", f"{PARTS}server_optimisers.py", "v = v + delta.square()", "v = v + delta.abs()"),
    ("beside", DUAL, "global_gradient: ClassVar[bool] = True", "global_gradient: ClassVar[bool] = False"),
    ("beside", GLOBAL, "global_gradient: ClassVar[bool] = True", "global_gradient: ClassVar[bool] = False"),
    ("beside", MOMENTUM, "global_gradient: ClassVar[bool] = True", "global_gradient: ClassVar[bool] = False"),
    ("beside", VIEWS, "vector if self.shared is None else vector * self.shared", "vector"),
    ("beside", RATES, "server.delta = delta * scale", "server.delta = delta"),
    ("sums", SUMS, "return Scaffold(), FedLESAM(rho, direction)", "return (FedLESAM(rho, direction),)"),
    ("sums", SUMS, "return Scaffold(), SAM(rho)", "return (SAM(rho),)"),
    ("sums", SUMS, "FedACG(lam=gamma, beta=0.0)", "FedACG(lam=gamma)"),
    ("sums", SUMS, "return FedDyn(alpha), FedLESAM", "return FedDyn(), FedLESAM"),
)


def outdated() -> list[str]:
    """What mutations look for that their files do not contain any more; tests/docs sees to it that this is nothing."""
    return [f"{file} does not contain {old!r}" for _, file, old, _ in MUTATIONS if old not in (HOME / file).read_text()]


def caught(folder: Path, part: str, file: str, old: str, new: str) -> bool:
    """Whether the tests fail in a copy of the package with this change; the copy is restored."""
    path = folder / file
    text = path.read_text()
    path.write_text(text.replace(old, new))
    status = status_of(folder, shlex.split(OTHER_TESTS.get(part, f"{FORMS} -k {part}")))
    path.write_text(text)
    if status not in (0, 1):
        raise SystemExit(f"pytest ended with {status} for {part}: {old!r}")
    return status == 1


def status_of(folder: Path, tests: list[str]) -> int:
    """The exit status of pytest in a fork of this process, which has not imported the package yet."""
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
        sys.dont_write_bytecode = True
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", help="with commas between them; by default all")
    wanted = parser.parse_args().parts
    chosen = [line for line in MUTATIONS if wanted is None or line[0] in wanted.split(",")]
    if absent := outdated():
        raise SystemExit("\n".join([*absent, "Bring these mutations up to date."]))
    found: dict[str, list[bool]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for tree in ("fedflat", "tests"):
            shutil.copytree(HOME / tree, folder / tree, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HOME / "pyproject.toml", folder)
        for part, file, old, new in chosen:
            found.setdefault(part, []).append(caught(folder, part, file, old, new))
            print(f"{'caught' if found[part][-1] else 'MISSED'}  {part:10s} {old}  →  {new}", flush=True)
    total, hits = len(chosen), sum(map(sum, found.values()))
    by_part = {part: sum(results) for part, results in found.items()}
    print(json.dumps({"mutations": total, "caught": hits, "by part": by_part}))
    raise SystemExit(hits < total)


if __name__ == "__main__":
    main()
