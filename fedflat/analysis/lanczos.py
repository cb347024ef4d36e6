"""Largest and smallest eigenvalues of a symmetric operator, by Lanczos' method with full re-orthogonalisation.

Every new vector is made orthogonal to all earlier ones, so that rounding does not let an eigenvalue appear a second
time (a "ghost"). As a consequence, Lanczos reliably finds only one copy of a multiple eigenvalue. The others appear
late, through rounding, or when the Krylov space is exhausted and a random vector continues it. `multiplicity=True`
searches for them: it restarts the method in the complement of the eigenvectors found, until no larger value appears.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from fedflat.analysis.hvp import Product
from fedflat.core import streams
from fedflat.core.devices import on
from fedflat.errors import InputError

log = logging.getLogger(__name__)
CANCELLED = 0.7  # if less of a vector's norm is left, orthogonalise it once more
LOOSER = 10.0  # factor on the tolerance of the smallest eigenvalue, which often lies in a dense cluster


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Approximate eigenpairs in descending order of the eigenvalue.

    Attributes:
        vectors: Unit eigenvectors, one per row, where the operator computes; the rest is on the CPU.
        residuals: ‖Hv − λv‖; a true eigenvalue lies within that distance of λ.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice | Tensor) -> Eigenpairs:
        return Eigenpairs(self.values[part], self.vectors[part], self.residuals[part])


class Krylov:
    """An orthonormal basis in which the operator is tridiagonal; each product adds one vector.

    The first vector is random unless `begin` sets it.

    Args:
        avoid: Orthonormal rows; the basis stays in their orthogonal complement.
    """

    def __init__(
        self, product: Product, size: int, like: Tensor, stream: streams.Stream, avoid: Tensor | None = None
    ) -> None:
        self._product, self._stream = product, stream
        self._avoid = like.new_empty(0, size) if avoid is None else avoid
        self.dimension = size - len(self._avoid)  # of the space that can be filled
        self._rows = like.new_empty(0, size)
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self._next: Tensor | None = None

    def __len__(self) -> int:
        return len(self.alphas)

    @property
    def basis(self) -> Tensor:
        """The vectors so far, as rows."""
        return self._rows[: len(self)]

    def begin(self, start: Tensor) -> Krylov:
        """Start from this vector, scaled to unit norm."""
        self._next = start / start.norm()
        return self

    def extend(self) -> None:
        """Compute one product and add one vector."""
        if len(self) == self.dimension:
            raise InputError(f"the Krylov space has no more than {self.dimension} dimensions")
        vector = self._fresh() if self._next is None else self._next
        self._append(vector)
        image = self._product(vector)
        self.alphas.append(float(vector @ image))
        self._recur(image)
        self._orthogonalise(image)
        scale = max(map(abs, (*self.alphas, *self.betas)))
        beta = float(image.norm())
        if len(self) == self.dimension or beta <= torch.finfo(image.dtype).eps * scale:
            beta, self._next = (
                0.0,
                None,
            )  # an invariant subspace: the Ritz pairs are exact, and a new direction is needed
        else:
            self._next = image / beta
        self.betas.append(beta)

    def _recur(self, image: Tensor) -> None:
        """Subtract the components along the last two vectors, the only ones that an exact image has."""
        image.sub_(self._rows[len(self) - 1], alpha=self.alphas[-1])
        if self.betas:
            image.sub_(self._rows[len(self) - 2], alpha=self.betas[-1])

    def _append(self, vector: Tensor) -> None:
        if len(self._rows) == len(self):
            room = min(max(2 * len(self), 32), self.dimension)
            rows = self._rows.new_empty(room, self._rows.shape[1])
            rows[: len(self)] = self._rows
            self._rows = rows
        self._rows[len(self)] = vector

    def _fresh(self) -> Tensor:
        draw = on(self._stream.normal(self._rows.shape[1], torch.float64).to(self._rows.dtype), self._rows.device)
        self._orthogonalise(draw)
        return torch.div(draw, draw.norm())

    def _orthogonalise(self, vector: Tensor) -> None:
        """Against the basis and `avoid`; twice if the first pass cancels much, since rounding errors then remain."""
        for _ in range(2):
            before = vector.norm()
            for rows in (self.basis, self._avoid):
                vector -= rows.T @ (rows @ vector)
            if vector.norm() > CANCELLED * before:
                return

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues of the tridiagonal matrix (descending), its eigenvectors in columns, and residuals."""
        matrix = torch.diag(torch.tensor(self.alphas, dtype=torch.float64))
        side = torch.tensor(self.betas[:-1], dtype=torch.float64)
        matrix += torch.diag(side, 1) + torch.diag(side, -1)
        values, columns = torch.linalg.eigh(matrix)
        values, columns = values.flip(0), columns.flip(1)
        return values, columns, (self.betas[-1] * columns[-1]).abs()

    def pairs(self, places: list[int]) -> Eigenpairs:
        """Ritz pairs at some places of the descending order."""
        values, columns, residuals = self.ritz()
        vectors = on(columns[:, places].T.to(self.basis.dtype), self.basis.device) @ self.basis
        return Eigenpairs(values[places], vectors, residuals[places])


def first_steps(size: int, k: int) -> int:
    """Number of steps before the first check of convergence."""
    return min(size, max(2 * k + 20, 40))


def extreme_eigenpairs(
    product: Product,
    like: Tensor,
    k: int,
    *,
    tol: float = 1e-3,
    steps: int | None = None,
    multiplicity: bool = False,
    seed: int = 0,
) -> tuple[Eigenpairs, Eigenpairs]:
    """The k largest eigenpairs and the smallest one of a symmetric operator.

    Args:
        product: v ↦ Hv.
        like: A vector with the size, type and device of v.
        tol: Continue until every residual is below tol·max|λ| (10·tol·max|λ| for the smallest eigenvalue), for at most
            four times `first_steps`; log a warning if that is not enough.
        steps: Take exactly this number of steps instead.
        multiplicity: Search for further copies of multiple eigenvalues; see the module.
        seed: Seed of the start vector.
    """
    if not 1 <= k <= like.numel():
        raise InputError(f"k must be from 1 to the number of parameters, {like.numel()}; got {k}")
    if steps is not None and not k <= steps <= like.numel():
        raise InputError(f"steps must be from k={k} to the number of parameters, {like.numel()}; got {steps}")
    krylov = Krylov(product, like.numel(), like, streams.stream(seed, "lanczos"))
    grow(krylov, k, tol, steps)
    top, bottom = krylov.pairs(list(range(k))), krylov.pairs([len(krylov) - 1])
    restart = 0
    while multiplicity and k < like.numel():
        restart += 1
        other = Krylov(product, like.numel(), like, streams.stream(seed, "lanczos", restart), top.vectors)
        grow(other, 1, tol, None)
        found = other.pairs(list(range(min(k, len(other)))))
        scale = float(top.values.abs().max())
        found = found[(found.values > top.values[-1] + tol * scale) & (found.residuals <= tol * scale)]
        if not len(found):
            break
        top = _merged(top, found, k)
    return top, bottom


def grow(krylov: Krylov, k: int, tol: float, steps: int | None) -> None:
    """Extend a Krylov space until its k largest Ritz pairs and the smallest have converged."""
    first = first_steps(krylov.dimension, k) if steps is None else steps
    limit = min(4 * first, krylov.dimension) if steps is None else steps
    pause = 1 + first // 40  # steps between two checks, which are slow for many steps
    while len(krylov) < limit:
        krylov.extend()
        beyond = len(krylov) - first
        if steps is None and beyond >= 0 and beyond % pause == 0 and _worst(krylov, k) <= tol:
            return
    if steps is None and _worst(krylov, k) > tol:
        log.warning("lanczos: after %d products the largest residual is %.1e of max|λ|", limit, _worst(krylov, k))


def _worst(krylov: Krylov, k: int) -> float:
    """The largest residual that matters, relative to max|λ|."""
    values, _, residuals = krylov.ritz()
    worst = max(float(residuals[:k].max()), float(residuals[-1]) / LOOSER)
    return worst / max(float(values.abs().max()), torch.finfo(torch.float64).tiny)


def _merged(a: Eigenpairs, b: Eigenpairs, k: int) -> Eigenpairs:
    """The k largest of both."""
    both = Eigenpairs(*(torch.cat(parts) for parts in zip(_parts(a), _parts(b), strict=True)))
    return both[both.values.argsort(descending=True)[:k]]


def _parts(pairs: Eigenpairs) -> tuple[Tensor, Tensor, Tensor]:
    return pairs.values, pairs.vectors, pairs.residuals
