"""The parts, one file per paper or family. A new one is a file like these and a line in `PARTS`.

Parts of other packages register under the entry-point group `fedflat.parts`, or with `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from inspect import get_annotations

from fedflat import calls
from fedflat.errors import InputError, nearest
from fedflat.method import SLOTS, Part
from fedflat.parts.adabest import AdaBest
from fedflat.parts.attack import Attack
from fedflat.parts.const import Const
from fedflat.parts.cutmix import CutMix
from fedflat.parts.cutout import Cutout
from fedflat.parts.fedalign import FedAlign
from fedflat.parts.fedavg import FedAvg
from fedflat.parts.feddc import FedDC
from fedflat.parts.feddyn import FedDyn
from fedflat.parts.fednova import FedNova
from fedflat.parts.fedprox import FedProx
from fedflat.parts.fedspeed import FedSpeed
from fedflat.parts.gradaug import GradAug
from fedflat.parts.keep_momentum import KeepMomentum
from fedflat.parts.man import MAN
from fedflat.parts.mixup import Mixup
from fedflat.parts.mofedsam import MoFedSAM
from fedflat.parts.moon import Moon
from fedflat.parts.personal.apfl import APFL
from fedflat.parts.personal.ditto import Ditto
from fedflat.parts.personal.hypernetwork import PLGUGHN, PFedHN
from fedflat.parts.personal.layerwise import LWSAM
from fedflat.parts.personal.pfedme import PFedMe
from fedflat.parts.personal.plgu import PLGULF, PLGUGRep
from fedflat.parts.personal.split import FedBABU, FedPer, FedRep, FineTune, LGFedAvg, LocalOnly
from fedflat.parts.privacy import DP
from fedflat.parts.robust import CentredClipping, Krum, Median, MultiKrum, NormBound, TrimmedMean
from fedflat.parts.sam import ASAM, SAM
from fedflat.parts.scaffold import Scaffold
from fedflat.parts.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedflat.parts.stochdepth import StochDepth
from fedflat.parts.swa import SWA

PARTS: tuple[type[Part], ...] = (
    *(FedAvg, FedProx, FedAvgM, FedAdam, FedAdagrad, FedYogi, Scaffold, FedDyn, FedDC, AdaBest, Moon, SAM, ASAM),
    *(MoFedSAM, FedSpeed, FedNova, MAN, Const, SWA, KeepMomentum),
    *(FedAlign, GradAug, StochDepth, Mixup, Cutout, CutMix),
    *(DP, Median, TrimmedMean, Krum, MultiKrum, CentredClipping, NormBound, Attack),
    *(
        LWSAM,
        PLGULF,
        PLGUGRep,
        PLGUGHN,
        Ditto,
        PFedMe,
        FedRep,
        PFedHN,
        FedPer,
        FedBABU,
        LGFedAvg,
        APFL,
        FineTune,
        LocalOnly,
    ),
)

ALIASES: dict[str, type[Part]] = {"fedsam": SAM, "fedasam": ASAM, "fedconst": Const, "fedman": MAN}
"""Famous names for `fedavg` plus one part, whose fields they take."""

_registered: dict[str, type[Part]] = {}


def register(part: type[Part]) -> type[Part]:
    """Make a part of your own known to method strings under its `name` (usable as a class decorator)."""
    if part.name in {known.name for known in PARTS} | ALIASES.keys():
        raise InputError(f"a part called {part.name!r} exists already; choose another name")
    _check_spelling(part)
    _registered[part.name] = part
    return part


def _check_spelling(part: type[Part]) -> None:
    """Refuse what would be passed over in silence: a slot misspelt, and fields of a class that is no dataclass."""
    for name, value in vars(part).items():
        near = None if name.startswith("_") or name in SLOTS or not callable(value) else nearest(name, SLOTS, 0.85)
        if near:
            raise InputError(f"{part.__name__}.{name} fills no slot: did you mean {near!r}?")
    fields = [name for name, kind in get_annotations(part).items() if "ClassVar" not in str(kind)]
    if fields and "__dataclass_fields__" not in vars(part):
        raise InputError(f"{part.__name__} has fields but is no dataclass: write @dataclass(frozen=True) above it")


@cache
def _installed() -> dict[str, type[Part]]:
    return {entry.name: entry.load() for entry in entry_points(group="fedflat.parts")}


def known_parts() -> dict[str, type[Part]]:
    """All parts by name: the package's own, installed ones and registered ones."""
    return {part.name: part for part in PARTS} | _installed() | _registered


def parse_parts(text: str) -> list[Part]:
    """The parts of a method string, famous names resolved."""
    makers: dict[str, Callable[..., Part]] = {**known_parts(), **ALIASES}
    parts: list[Part] = []
    for call in calls.parse_sum(text):
        parts.append(calls.build("method", call, makers))
        if call.name in ALIASES:
            parts.append(FedAvg())
    return parts
