"""The parts, one file per paper or family of methods. A new part is a file like these and an entry in `PARTS`.

Parts of other packages register under the entry-point group `fedflat.parts`, or with `register`.
The docstrings count what a method keeps and sends in models: "sends 1 down, 1 up" means that per round every
participant receives one model and sends one.
"""

from __future__ import annotations

from fedflat.core.part import Part
from fedflat.core.registry import aliases, known_parts, parse_parts, register, ship
from fedflat.parts.adabest import AdaBest
from fedflat.parts.attack import Attack
from fedflat.parts.const import Const
from fedflat.parts.cutmix import CutMix
from fedflat.parts.cutout import Cutout
from fedflat.parts.distillation import FedNTD, FedSOL
from fedflat.parts.dual_sam import FedGloSS, FedSMOO
from fedflat.parts.fedalign import FedAlign
from fedflat.parts.fedavg import FedAvg
from fedflat.parts.feddc import FedDC
from fedflat.parts.feddyn import FedDyn
from fedflat.parts.fedinit import FedInit
from fedflat.parts.fednova import FedNova
from fedflat.parts.fedprox import FedProx
from fedflat.parts.fedspeed import FedSpeed
from fedflat.parts.fedswa import FedMoSWA, FedSWA
from fedflat.parts.fltrust import FLTrust
from fedflat.parts.global_momentum import FedACG, FedCM, FedWMSAM
from fedflat.parts.global_sam import FedGF, FedLESAM
from fedflat.parts.gradaug import GradAug
from fedflat.parts.keep_momentum import KeepMomentum
from fedflat.parts.label_skew import FedDecorr, FedLC
from fedflat.parts.man import MAN
from fedflat.parts.mixup import Mixup
from fedflat.parts.mofedsam import MoFedSAM
from fedflat.parts.moon import Moon
from fedflat.parts.named_sums import SUMS
from fedflat.parts.personal.apfl import APFL
from fedflat.parts.personal.ditto import Ditto
from fedflat.parts.personal.hypernetwork import PLGUGHN, PFedHN
from fedflat.parts.personal.ifca import IFCA
from fedflat.parts.personal.layerwise import LWSAM
from fedflat.parts.personal.pfedme import PFedMe
from fedflat.parts.personal.plgu import PLGULF, PLGUGRep
from fedflat.parts.personal.split import FedBABU, FedPer, FedRep, FineTune, LGFedAvg, LocalOnly
from fedflat.parts.privacy import DP
from fedflat.parts.regrouping import NNM, Bucketing
from fedflat.parts.robust import CentredClipping, GeometricMedian, Krum, Median, MultiKrum, NormBound, TrimmedMean
from fedflat.parts.sam import ASAM, SAM
from fedflat.parts.scaffold import Scaffold
from fedflat.parts.server_optimisers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedflat.parts.server_rates import FedExP, QFedAvg
from fedflat.parts.stochdepth import StochDepth
from fedflat.parts.swa import SWA

__all__ = ["ALIASES", "PARTS", "SUMS", "aliases", "known_parts", "parse_parts", "register"]

PARTS: tuple[type[Part], ...] = (
    *(FedAvg, FedProx, FedAvgM, FedAdam, FedAdagrad, FedYogi, Scaffold, FedDyn, FedDC, AdaBest, Moon, SAM, ASAM),
    *(MoFedSAM, FedSpeed, FedNova, MAN, Const, SWA, KeepMomentum),
    *(FedCM, FedACG, FedWMSAM, FedSMOO, FedGloSS, FedLESAM, FedGF, FedSOL, FedSWA, FedMoSWA, FedInit, FedExP, QFedAvg),
    *(FedNTD, FedLC, FedDecorr),
    *(FedAlign, GradAug, StochDepth, Mixup, Cutout, CutMix),
    *(DP, Median, TrimmedMean, Krum, MultiKrum, CentredClipping, NormBound, Attack),
    *(GeometricMedian, FLTrust, Bucketing, NNM),
    *(LWSAM, PLGULF, PLGUGRep, PLGUGHN, Ditto, PFedMe, FedRep, PFedHN),
    *(FedPer, FedBABU, LGFedAvg, APFL, FineTune, LocalOnly, IFCA),
)

ALIASES: dict[str, type[Part]] = {"fedsam": SAM, "fedasam": ASAM, "fedconst": Const, "fedman": MAN}
"""Well-known names for `fedavg` plus one part; they take the fields of that part."""

ship(PARTS, ALIASES, SUMS)
