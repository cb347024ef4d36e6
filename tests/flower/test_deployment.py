"""The same experiment on Flower: the same bits, state that stays at home, and strangers who cannot spoil a run."""

from __future__ import annotations

import io
import json
import re
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, restless, same

import fedflat
from fedflat import Experiment, Federation, Run
from fedflat.cli import main
from fedflat.errors import InputError, RunError

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedflat[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Array, Context, Error, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.simulation import run_simulation

from fedflat.flower import Admission, client_app, named_data, server_app
from fedflat.flower.keys import write_node_key
from fedflat.flower.project import write_project

from .fleet import PATIENCE, fleet, wait_until
from .loopback import Loopback, instruction, start
from .trials import SIZES, assert_same, deployed, federation, kept_by, simulated, trial

# ---- the same result ----


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {}),
        ("fedavg", {"dtype": "float32", "momentum": 0.9, "new_clients": 1}),
        ("scaffold+asam+swa(start=0.5)", {"weighting": "samples"}),
        ("feddyn+sam", {}),
        ("adabest", {}),
        ("fednova", {"local_epochs": 2}),
        ("fedadam+keep_momentum", {"momentum": 0.5}),
        ("diary", {}),
        ("ditto", {"evaluate_clients": 2}),
        ("fedrep", {"model": "mlp"}),
        ("pfedhn", {}),
        ("median+attack(kind='sign_flip', scale=5.0)", {}),
        ("trimmed_mean(beta=0.34)+attack(kind='noise', clients=2)", {}),
        ("krum(attackers=0)+attack(kind='label_flip')", {}),
        ("multikrum(attackers=0, keep=2)", {"weighting": "samples"}),
        ("centred_clipping(tau=0.1, steps=2)", {}),
        ("norm_bound(limit=0.1)+sam", {}),
        ("dp(noise=0.5)", {"participation": "all"}),
        ("dp(noise=0.5)+fedavgm", {"participation": "bernoulli(0.5)"}),
        ("dp(noise=0.5)+attack(scale=3.0)", {}),
    ],
)
def test_every_round_is_that_of_a_simulation(tmp_path: Path, method: str, changes: dict[str, Any]) -> None:
    experiment = trial(method, **changes)
    here, (there, _) = simulated(experiment), deployed(tmp_path, experiment, seed=experiment.seed)
    assert_same(here, there)
    for client in range(len(SIZES)):
        assert same(here.client_state(client), kept_by(tmp_path, client))


@pytest.mark.parametrize("policy", ["average", "local", "silobn", "recompute"])
def test_batch_normalisation_and_dropout(tmp_path: Path, policy: str) -> None:
    experiment = trial("scaffold", batchnorm=policy, dtype="float32")
    here, (there, _) = simulated(experiment, restless()), deployed(tmp_path, experiment, own=restless())
    assert_same(here, there)
    assert all(same(here.client_state(client), kept_by(tmp_path, client)) for client in range(len(SIZES)))


def test_a_named_data_set(tmp_path: Path) -> None:
    experiment = Experiment(
        data="digits", model="mlp", clients=4, partition="iid", participation="all", rounds=1, local_steps=3
    )
    data = named_data(experiment)
    app = client_app(experiment, data=data, state=tmp_path / "state")
    start(server_app(experiment, test=data, out=tmp_path / "run", wait=1, timeout=1), Loopback(app, range(4)))
    here = fedflat.run(experiment.replace(backend="serial"))
    assert_same(here, fedflat.load_run(tmp_path / "run"))


def test_a_function_gives_each_client_its_own_samples(tmp_path: Path) -> None:
    """Which is all there is on its machine, and may lack the classes that others have."""
    experiment, whole = trial(rounds=2), federation()

    def data(context: Context) -> Any:
        client = int(context.node_config["partition-id"])
        return blobs(SIZES[client], seed=client)

    app = client_app(experiment, data=data, state=tmp_path / "state")
    start(
        server_app(experiment, test=lambda: blobs(30, seed=1000), out=tmp_path / "run", wait=1), Loopback(app, range(4))
    )
    here = fedflat.run(experiment, federation=Federation([blobs(n, seed=i) for i, n in enumerate(SIZES)], whole.test))
    assert_same(here, fedflat.load_run(tmp_path / "run"))


# ---- what stays at home ----


def numbers_in(message: Message) -> list[torch.Tensor]:
    records = message.content.array_records.values() if message.has_content() else []
    return [torch.from_numpy(array.numpy()).double().reshape(-1) for record in records for array in record.values()]


def test_a_private_head_is_in_no_message(tmp_path: Path) -> None:
    _, grid = deployed(tmp_path, trial("fedrep", model="mlp"))
    (made, *_), *others = [tensors for tensors in map(numbers_in, grid.messages) if tensors]
    for client in range(len(SIZES)):
        head = kept_by(tmp_path, client)["private"]["theta"].double()
        learnt = head[~torch.isin(head, made)]
        assert len(learnt) > len(head) / 2
        assert not any(torch.isin(learnt, tensor).any() for tensors in others for tensor in tensors)


def test_the_state_of_a_personal_model_is_in_no_message_and_on_no_servers_disk(tmp_path: Path) -> None:
    run, grid = deployed(tmp_path, trial("ditto"))
    own = kept_by(tmp_path, 0)["ditto"]["theta"].double()
    assert not any(torch.isin(own, tensor).any() for message in grid.messages for tensor in numbers_in(message))
    assert set(run.client_state(0)) == {"flower"}
    assert run.client_state(0)["flower"]["kept"].numel() == 1


def test_a_server_that_is_started_again_goes_on_with_its_round(tmp_path: Path) -> None:
    """Some clients had trained in the round that it lost, and go back to where they were before."""
    experiment = trial("scaffold", rounds=5, participation="all")

    def killed(message: Message, answer: Message) -> Message:
        asked = instruction(message)
        if asked["round"] == 3 and asked["client"] == 3:
            raise KeyboardInterrupt
        return answer

    with pytest.raises(fedflat.FedflatError, match="interrupted after round 2"):
        deployed(tmp_path, experiment, killed)
    there, grid = deployed(tmp_path, experiment)
    assert next(instruction(m)["round"] for m in grid.messages if "instruction" in m.content) == 3
    here = simulated(experiment)
    assert_same(here, there)
    assert all(same(here.client_state(client), kept_by(tmp_path, client)) for client in range(len(SIZES)))


# ---- strangers ----


def answers(message: Message, change: Callable[[RecordDict], None]) -> Message:
    change(message.content)
    return message


def spoil(name: str, value: np.ndarray) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content.array_records["update"][name] = Array(value)

    return change


def tell(**values: Any) -> Callable[[RecordDict], None]:
    return lambda content: content.config_records["told"].update(values)


def lie(content: RecordDict) -> None:
    """Pickled code under the name of numbers."""
    true = content.array_records["update"]["delta"]
    content.array_records["update"]["delta"] = Array(true.dtype, true.shape, true.stype, b"\x80\x04cos\nsystem\n.")


def forget(content: RecordDict) -> None:
    del content.array_records["update"]["sent/scaffold/c"]


SPOILT: dict[str, tuple[Callable[[RecordDict], None], str]] = {
    "nan": (spoil("delta", np.full(15, np.nan)), "not finite"),
    "infinite": (spoil("sent/scaffold/c", np.full(15, np.inf)), "not finite"),
    "shape": (spoil("delta", np.zeros(14)), r"\(14,\)"),
    "type": (spoil("delta", np.zeros(15, np.float32)), "float32"),
    "name": (spoil("sent/scaffold/virus", np.zeros(1)), "unasked"),
    "missing": (forget, "did not send"),
    "bytes": (lie, "cannot be read"),
    "round": (tell(round=1), "answered for round 1"),
    "client": (tell(client=0), "and client 0"),
    "steps": (tell(steps=-1), "steps=-1"),
    "loss": (tell(loss=float("inf")), "loss=inf"),
    "kept": (tell(kept=7), "a state of round 7"),
    "empty": (lambda content: content.clear(), "sent no values"),
    "failure": (tell(failure="out of \x1b[2J memory"), r"out of  \[2J memory"),
}


def test_others_train_as_if_a_client_that_sends_garbage_had_not_been_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every kind of garbage has a round of its own."""
    kinds = [*SPOILT, "no answer", "error"]
    experiment = trial("scaffold", rounds=len(kinds) + 1, participation="all", evaluate_every=0)

    def tamper(message: Message, answer: Message) -> Message | None:
        asked = instruction(message)
        if asked["round"] < 2 or asked["client"] != 1 or asked["kind"] != "train":
            return answer
        kind = kinds[asked["round"] - 2]
        if kind in SPOILT:
            return answers(answer, SPOILT[kind][0])
        return None if kind == "no answer" else Message(Error(1, "no memory"), reply_to=message)

    there, _ = deployed(tmp_path, experiment, tamper)
    assert [row["left_out"] for row in there.metrics] == [0] + len(kinds) * [1]
    assert [row["client"] for row in there.clients if row["round"] == 2] == [0, 2, 3]
    logged = [record.getMessage() for record in caplog.records if "client 1 is left out" in record.getMessage()]
    patterns = [*(pattern for _, pattern in SPOILT.values()), "has not answered within", "failed: no memory"]
    assert len(logged) == len(patterns)
    for line, pattern in zip(logged, patterns, strict=True):
        assert re.search(pattern, line)
    here = simulated(experiment, participants=lambda t: [0, 2, 3] if t else [0, 1, 2, 3])
    assert torch.allclose(here.server_weights, there.server_weights, rtol=1e-12, atol=0)
    assert torch.allclose(here.server_state["scaffold"]["c"], there.server_state["scaffold"]["c"], rtol=1e-12, atol=0)


def test_a_round_in_which_nobody_is_heard_changes_nothing(tmp_path: Path) -> None:
    experiment = trial(rounds=3, participation="all")
    silent: Any = lambda m, a: None if instruction(m)["round"] == 2 else a  # noqa: E731
    there, _ = deployed(tmp_path, experiment, silent)
    assert [row["clients"] for row in there.metrics] == [4, 0, 4]
    assert there.metrics[0]["accuracy"] == there.metrics[1]["accuracy"] is not None
    assert there.metrics[1]["train_loss"] is None


def test_a_round_that_nobody_answers_is_void_also_where_dp_adds_no_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can be recognised by noise that is not there, and scaffold has no control variates to add up."""
    experiment = trial("dp(clip=1.0, noise=0)+scaffold", rounds=3, participation="all")
    silent: Any = lambda m, a: None if instruction(m)["round"] == 2 else a  # noqa: E731
    there, _ = deployed(tmp_path, experiment, silent, callbacks=[notes := Notes()])
    assert [row["clients"] for row in there.metrics] == [4, 0, 4]
    assert [row["left_out"] for row in there.metrics] == [0, 4, 0]
    assert "round 2 is void" in caplog.text
    first, second, third = notes.states
    assert same(first, second) and not same(second, third)
    assert first["c"].norm() > 0


class Notes(fedflat.Callback):
    """The server's weights and control variates after every round."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def round(self, run: Run, metrics: Any) -> None:
        self.states.append({"theta": run.server_weights.clone(), "c": run.server_state["scaffold"]["c"].clone()})


def test_a_client_that_has_lost_its_state_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def burnt(message: Message, answer: Message) -> Message:
        if instruction(message)["round"] == 1:
            for path in tmp_path.glob("state/*/2/*/*"):
                path.unlink()
        return answer

    there, _ = deployed(tmp_path, trial("scaffold", rounds=2, participation="all"), burnt)
    assert [row["left_out"] for row in there.metrics] == [0, 1]
    assert "client 2 is left out" in caplog.text and "is missing" in caplog.text


# ---- who may join ----


def joined(folder: Path, numbers: list[int], *, others: Experiment | None = None, **options: Any) -> Loopback:
    experiment = trial(rounds=1, participation="all")
    grid = Loopback(client_app(others or experiment, data=federation(), state=folder / "state"), numbers)
    options = {"wait": 0.2, "timeout": 0.2, "admission": Admission(classes=3)} | options
    start(server_app(experiment, out=folder / "run", **options), grid)
    return grid


def test_of_two_nodes_that_claim_one_number_the_second_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = joined(tmp_path, [0, 1, 2, 3, 1])
    assert "client 1 is there already" in caplog.text
    trained = [m.metadata.dst_node_id for m in grid.messages if m.metadata.message_type == "train"]
    assert 101 in trained and 104 not in trained


def test_a_node_without_a_number_of_this_federation_cannot_join(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = joined(tmp_path, [0, 1, 2, 3, 7])
    assert "node 104 cannot join" in caplog.text and "which client it is" in caplog.text
    assert not [m for m in grid.messages if m.metadata.dst_node_id == 104 and m.metadata.message_type == "train"]


def test_who_runs_another_experiment_cannot_join(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunError, match="in vain for clients 0, 1, 2, 3 of 4"):
        joined(tmp_path, [0, 1, 2, 3], others=trial(rounds=1, participation="all", lr=1.0))
    assert "runs another experiment" in caplog.text


def test_the_first_round_waits_for_all_and_later_ones_for_nobody(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="in vain for clients 3 of 4 to join"):
        joined(tmp_path, [0, 1, 2])
    experiment = trial(rounds=3, participation="all")
    held = federation()
    grid = Loopback(client_app(experiment, data=held, state=tmp_path / "state"), range(4))

    class Leave(fedflat.Callback):
        def round(self, run: Run, metrics: Any) -> None:
            grid.away = {103} if metrics["round"] == 1 else set()

    listed = Admission(classes=3)
    app = server_app(experiment, out=tmp_path / "other", wait=0.5, timeout=0.5, callbacks=[Leave()], admission=listed)
    start(app, grid)
    assert [row["clients"] for row in fedflat.load_run(tmp_path / "other").metrics] == [4, 3, 4]


def test_what_only_a_simulation_can_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="serves simulations only, and cannot be deployed"):
        deployed(tmp_path, trial(evaluated="all"))


# ---- projects ----


def test_a_project_is_ready_to_start_and_its_private_keys_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    words = ["--data", "digits", "--model", "mlp", "--clients", "2", "--method", "ditto"]
    assert main(["deploy", "init", str(folder), *words]) == 0
    assert Experiment.from_toml(folder / "experiment.toml").method == "ditto"
    for name in ("server.key", "node-0", "node-1"):
        assert (folder / "keys" / name).stat().st_mode & 0o777 == 0o600
    authority, own = (
        x509.load_pem_x509_certificate((folder / "keys" / f).read_bytes()) for f in ("ca.pem", "server.pem")
    )
    own.verify_directly_issued_by(authority)
    private = load_ssh_private_key((folder / "keys" / "node-1").read_bytes(), None)
    assert load_ssh_public_key((folder / "keys" / "node-1.pub").read_bytes()) == private.public_key()
    readme = (folder / "README.md").read_text()
    assert all(
        word in readme for word in ("flower-superlink", "flwr supernode register", "flower-supernode", "flwr run")
    )
    assert main(["deploy", "init", str(folder), *words]) == 2  # it is not empty


def test_an_app_bundle_of_a_project_holds_no_keys_and_has_nothing_installed(tmp_path: Path) -> None:
    write_project(tmp_path / "project", trial())
    config = tomllib.loads((tmp_path / "project" / "pyproject.toml").read_text())
    bundle = build_fab_from_disk(tmp_path / "project")
    names = zipfile.ZipFile(io.BytesIO(bundle)).namelist()
    assert {"federation.py", "experiment.toml"} <= set(names)
    assert not [name for name in names if "key" in name or "node" in name or name.startswith("flower")]
    assert config["tool"]["flwr"]["app"]["components"]["clientapp"] == "federation:client"
    assert not config["project"]["dependencies"]  # Flower would install them from an index that need not have them


@pytest.mark.parametrize(("workers", "share"), [(None, "1"), (4, "0.25")])
def test_a_project_for_gpus_asks_for_the_share_of_one_that_each_client_needs(
    tmp_path: Path, workers: int | None, share: str
) -> None:
    for device, asked in (("cuda", f"client-resources-num-gpus={share}'"), ("cpu", "client-resources-num-cpus=1'")):
        write_project(tmp_path / device, trial(device=device, workers=workers))
        assert asked in (tmp_path / device / "README.md").read_text()


def test_flowers_own_simulation(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Flower simulates with Ray: pip install 'flwr[simulation]'")
    experiment, held = trial("ditto", rounds=2), federation()
    server = server_app(experiment, test=held, out=tmp_path / "run", wait=120, timeout=120)
    client = client_app(experiment, data=held, state=tmp_path / "state")
    run_simulation(server, client, num_supernodes=len(SIZES), backend_config={"init_args": {"num_cpus": 2}})
    here = simulated(experiment)
    assert_same(here, fedflat.load_run(tmp_path / "run"))
    assert all(same(here.client_state(client), kept_by(tmp_path, client)) for client in range(len(SIZES)))


# ---- machines of their own ----

APPS = '''
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array
from flwr.clientapp import ClientApp

from fedflat import Callback, Experiment, Federation
from fedflat.flower import Admission, client_app, server_app

def blobs(count, seed):
    y = torch.arange(count) % 3
    return torch.nn.functional.one_hot(y, 4) + torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)), y

class Garbled(ClientApp):
    """Sends no numbers from a node that is told so."""

    def __call__(self, message, context):
        reply = honest(message, context)
        if "garbage" in context.node_config and "update" in reply.content:
            reply.content["update"]["delta"] = Array(np.full(reply.content["update"]["delta"].shape, np.nan, "float32"))
        return reply

class Gate(Callback):
    """Goes on after a round when it is told so."""

    def round(self, run, metrics):
        while not Path(f"after-{metrics['round']}").exists():
            time.sleep(0.1)

experiment = Experiment.from_toml(Path(__file__).parent / "experiment.toml")
held = Federation([blobs(n, n) for n in (8, 12, 10)], test=blobs(30, 0))
honest = client_app(experiment, data=held)
client = Garbled()
chosen = lambda t: [0, 1, 2] if t < 2 else [1]
server = server_app(experiment, test=held, participants=chosen, timeout=200, wait=200, callbacks=[Gate()])
'''


def test_a_superlink_and_three_supernodes_with_tls_and_keys(tmp_path: Path) -> None:
    """One node is killed and started again, one sends garbage, and one whose key nobody knows is refused."""
    experiment = Experiment(
        model="logistic",
        method="scaffold",
        clients=3,
        participation="all",
        rounds=3,
        local_steps=2,
        batch_size=4,
        lr=0.05,
    )
    rows = tmp_path / "project" / "run" / "clients.jsonl"  # written before the gates of `APPS`, metrics after them

    def rounds() -> int:
        return len({json.loads(row)["round"] for row in rows.read_text().splitlines()}) if rows.exists() else 0

    with fleet(tmp_path / "project", experiment, APPS) as there:
        write_node_key(tmp_path, 9)
        there.superlink()
        there.register(0, 1, 2)
        nodes = [there.supernode(0), there.supernode(1), there.supernode(2, extra="garbage=true")]
        intruder = there.supernode(0, key=str(tmp_path / "node-9"))
        wait_until(lambda: all("SuperNode ID" in there.log(f"node{n}") for n in range(3)), "the nodes to be admitted")
        assert intruder.wait(PATIENCE) != 0
        there.run()
        wait_until(lambda: rounds() == 1, "the first round")
        nodes[1].kill()
        wait_until(lambda: there.online() == 2, "the SuperLink to notice")
        (there.folder / "after-1").touch()
        wait_until(lambda: rounds() == 2, "the second round")
        there.supernode(1)
        for gate in ("after-2", "after-3"):
            (there.folder / gate).touch()
        wait_until(lambda: rounds() == 3, "the last round")
    assert not there.members()
    deployed = fedflat.load_run(tmp_path / "project" / "run")
    heard = [[row["client"] for row in deployed.clients if row["round"] == t] for t in (1, 2, 3)]
    assert heard == [[0, 1], [0], [1]]
    assert [row["left_out"] for row in deployed.metrics] == [1, 2, 0]
    scope: dict[str, Any] = {"__file__": str(tmp_path / "project" / "federation.py")}
    exec(APPS, scope)
    here = fedflat.run(experiment.replace(backend="serial"), federation=scope["held"], participants=lambda t: heard[t])
    assert torch.allclose(here.server_weights, deployed.server_weights, rtol=1e-6, atol=1e-7)
    for client in (0, 1):
        kept = kept_by(tmp_path / "project", client)["scaffold"]["c"]
        assert torch.allclose(here.client_state(client)["scaffold"]["c"], kept, rtol=1e-5, atol=1e-6)
