"""The one list of all parts: what every test that is about all of them goes through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """text: the part with values that matter on small problems. null: the form that is FedAvg bit for bit, if any.

    uniform: the null form takes plain means. client, server: names of the tensors it keeps.
    """

    text: str
    null: str | None = None
    uniform: bool = False
    client: tuple[str, ...] = ()
    server: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.text.split("(")[0]

    def __str__(self) -> str:
        return self.text


PARTS = (
    Listed("fedavg", null="fedavg"),
    Listed("fedprox(mu=0.2)", null="fedprox(mu=0.0)"),
    Listed("fedavgm(beta=0.6)", null="fedavgm(beta=0.0)", server=("v",)),
    Listed("fedadam", server=("m", "v")),
    Listed("fedadam(v_init=0.0, bias_correction=True)", server=("m", "v")),
    Listed("fedadagrad", server=("v",)),
    Listed("fedadagrad(beta1=0.5)", server=("m", "v")),
    Listed("fedyogi", server=("m", "v")),
    Listed("scaffold", client=("c",), server=("c",)),
    Listed("scaffold(option=1)", client=("c",), server=("c",)),
    Listed("feddyn(alpha=0.2)", client=("h",), server=("h",)),
    Listed("feddyn(alpha=0.2, clip_split=True)", client=("h",), server=("h",)),
    Listed("feddc(alpha=0.2)", client=("c", "h"), server=("c", "h")),
    Listed(
        "adabest(beta=0.7, mu=0.2)",
        null="adabest(beta=0.0, mu=0.0)",
        uniform=True,
        client=("h", "last"),
        server=("mean",),
    ),
    Listed("moon(mu=1.0)", null="moon(mu=0.0)", client=("previous",)),
    Listed("sam(rho=0.1)", null="sam(rho=0.0)"),
    Listed("asam(rho=0.2, eta=0.2)", null="asam(rho=0.0)"),
    Listed("mofedsam(beta=0.5, rho=0.1)", server=("m",)),
    Listed("fedspeed(rho=0.1, alpha=0.2)", client=("h",), server=("h",)),
    Listed("fedspeed(rho=0.1, alpha=0.2, mix=0.5, server='paper')", client=("h",)),
    Listed("fednova"),
    Listed("man(zeta=0.3)", null="man(zeta=0.0)"),
    Listed("const", null="const(center=False, orthogonal=False)"),
    Listed("const(mode='sphere')"),
    Listed("dp(clip=0.2, noise=0.05)", null="dp(clip=None, noise=0.0)", uniform=True),
    Listed("dp(clip=0.2, noise=0.05, quantile=0.5)", server=("clip",)),
    Listed("median"),
    Listed("trimmed_mean(beta=0.34)", null="trimmed_mean(beta=0.0)", uniform=True),
    Listed("krum(attackers=0)"),
    Listed("multikrum(attackers=0, keep=2)", null="multikrum(attackers=0)", uniform=True),
    Listed("centred_clipping(tau=0.1)", server=("centre",)),
    Listed("norm_bound(limit=0.2)", null="norm_bound(limit=None)", uniform=True),
    Listed("norm_bound(quantile=0.4)"),
    Listed("geometric_median(steps=3)"),
    Listed("nnm(attackers=0)", uniform=True),
    Listed("attack(clients=4, scale=0.5)", null="attack(clients=0)"),
    Listed("fedcm(alpha=0.5)", null="fedcm(alpha=1.0)", uniform=True, server=("m",)),
    Listed("fedacg(lam=0.5, beta=0.1)", null="fedacg(lam=0.0, beta=0.0)", uniform=True, server=("m",)),
    Listed("fedwmsam(alpha=0.4, rho=0.1, rate=0.2)", client=("c",), server=("alpha", "c", "m")),
    Listed("fedsmoo(rho=0.1, alpha=0.2)", client=("h", "mu"), server=("h", "s")),
    Listed("fedsmoo(rho=0.1, alpha=0.2, server='paper')", client=("h", "mu"), server=("h", "s")),
    Listed("fedgloss(rho=0.1, rho_l=0.1, beta=5.0)", client=("h",), server=("d", "h")),
    Listed("fedgloss(rho=0.1, rho_l=0.1, server='code', warmup=3)", client=("h",), server=("d", "h")),
    Listed("fedlesam(rho=0.2)", null="fedlesam(rho=0.0)", client=("old",)),
    Listed("fedlesam(rho=0.2, direction='last')", null="fedlesam(rho=0.0, direction='last')", server=("old",)),
    Listed("fedgf(rho=0.1, threshold=0.3, window=3)", null="fedgf(rho=0.0, threshold=None)", server=("last", "window")),
    Listed("fedsol(rho=0.3)", null="fedsol(rho=0.0)"),
    Listed("fedsol(rho=0.3, adaptive=True)", null="fedsol(rho=0.0, adaptive=True)"),
    Listed("fedswa(rho=0.2, alpha=1.2)", null="fedswa(rho=1.0, alpha=1.0)", uniform=True),
    Listed("fedmoswa(rho=0.2, alpha=1.2, gamma=0.4)", client=("c",), server=("c",)),
    Listed("fedmoswa(gamma=0.4, option=1)", client=("c",), server=("c",)),
    Listed("fedinit(beta=0.3)", null="fedinit(beta=0.0)", client=("last",)),
    Listed(
        "fedinit(beta=0.3, variant='code')",
        null="fedinit(beta=0.0, variant='code')",
        client=("last",),
        server=("first",),
    ),
    Listed("fedexp(eps=0.0)", server=("last",)),
    Listed("fedexp(eps=0.01, variant='code')", server=("last",)),
    Listed("qfedavg(q=2.0)", null="qfedavg(q=0.0)", uniform=True),
    Listed("feddecorr(beta=0.3)", null="feddecorr(beta=0.0)"),
    Listed("swa(start=0.4, cycle=2, lr_min=0.01)", server=("average", "count")),
    Listed("swa(start=0.4, cycle=2, lr_min=0.01, collect='cycle_end')", server=("average", "count")),
    Listed("swa(start=0.4, cycle=2, lr_min=0.01, collect='paper')", server=("average", "count")),
)
IMAGE_PARTS = (
    Listed("fedalign(width=0.5)", null="fedalign(mu=0.0)"),
    Listed("fedalign(width=0.5, objective='paper', slices='full')", null="fedalign(mu=0.0, objective='paper')"),
    Listed("gradaug(resolutions=(8, 6))", null="gradaug(mu=0.0, resolutions=(8, 6))"),
    Listed("gradaug(resolutions=(8, 6), all_random=True)"),
    Listed("stochdepth(keep=0.5)", null="stochdepth(keep=1.0)"),
    Listed("stochdepth(keep=0.5, rule='code')", null="stochdepth(keep=1.0, rule='code')"),
    Listed("mixup", null="mixup(gamma=0.0)"),
    Listed("cutout(size=4)", null="cutout(size=0)"),
    Listed("cutmix", null="cutmix(beta=0.0)"),
    Listed("fltrust(samples=6)"),
    Listed("attack(kind='alie', clients=2, scale=0.5)", null="attack(kind='alie', clients=0)"),
    Listed("bucketing(s=3)", null="bucketing(s=1)", uniform=True),
    Listed("fedntd(beta=2.0)", null="fedntd(beta=0.0)"),
    Listed("fedlc(tau=0.5)", null="fedlc(tau=0.0)"),
    Listed("fedlc(tau=0.5, form='log')", null="fedlc(tau=0.0, form='log')"),
)
"""Parts that want images, classes, stages or residual blocks, or whose draws tell clients apart; none keeps a thing."""
ALIASES = {
    "fedsam(rho=0.1)": "fedavg+sam(rho=0.1)",
    "fedasam(rho=0.2, eta=0.1)": "fedavg+asam(rho=0.2, eta=0.1)",
    "fedconst(center=False)": "fedavg+const(center=False)",
    "fedman(zeta=0.3)": "fedavg+man(zeta=0.3)",
    "fedgamma(rho=0.1)": "scaffold+sam(rho=0.1)",
    "fednsam(gamma=0.6, rho=0.1)": "fedacg(lam=0.6, beta=0.0)+sam(rho=0.1)",
    "fedlesam_s(rho=0.2)": "scaffold+fedlesam(rho=0.2)",
    "fedlesam_s(rho=0.2, direction='last')": "scaffold+fedlesam(rho=0.2, direction='last')",
    "fedlesam_d(rho=0.2)": "feddyn(alpha=0.1)+fedlesam(rho=0.2)",
    "mofedsam(beta=0.3, rho=0.2)": "fedcm(alpha=0.3)+sam(rho=0.2)",
    "mofedsam(beta=0.3, rho=0.0)": "fedcm(alpha=0.3)",
}
GRADIENT = (
    *("sam", "asam", "mofedsam", "fedspeed"),
    *("fedwmsam", "fedsmoo", "fedgloss", "fedlesam", "fedgf", "fedsol"),
)
"""Parts that make the gradient; two of them cannot be in one method."""
STEP = (
    *("fedavgm", "fedadam", "fedadagrad", "fedyogi", "feddyn", "feddc", "adabest", "fedspeed"),
    *("fedacg", "fedsmoo", "fedgloss", "fedswa", "fedmoswa", "fedexp", "qfedavg"),
)
"""Parts that own the server step."""
COMBINE = (
    "fednova",
    "dp",
    "median",
    "trimmed_mean",
    "krum",
    "multikrum",
    "centred_clipping",
    "norm_bound",
    "geometric_median",
    "fltrust",
)
"""Parts that own the combination of updates."""
MIXTURE = ("fedcm", "mofedsam", "fedwmsam")
"""Parts that mix the gradient with the last direction, after all others."""
LENGTH = ("fedgf", "qfedavg", "dp")
"""Parts that measure or scale updates."""
CONTROL = ("scaffold", "feddc", "fedmoswa", "fedwmsam")
"""Parts that correct gradients by control variates."""
NEED_MEAN = ("feddyn", "feddc", "fedspeed", "adabest", "fedsmoo", "fedgloss", "fedexp", "qfedavg", "fednova", "dp")
"""Parts whose server step is right for own updates or plain means only, such as H̄ = mean H_i."""
REPLACE_MEAN = (*COMBINE, "bucketing", "nnm")
"""Parts that put something else in place of the mean."""
