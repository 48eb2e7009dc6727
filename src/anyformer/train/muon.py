"""Muon (Jordan 2024): momentum, made orthogonal by Newton–Schulz iterations, for matrices inside blocks.

    M ← μ·M + (1 − μ)·G          U = (1 − μ)·G + μ·M  (Nesterov) or M
    X₀ = U / ‖U‖_F               X ← (a·I + b·XXᵀ + c·(XXᵀ)²)·X
    W ← (1 − η·λ)·W − η·scale·X

Matrices of one shape, or of its transpose, are stacked, so that a step is a few batched products however many layers
there are; a parameter [E, rows, cols] is E matrices, each made orthogonal by itself. Where the long side is at least
twice the short one, float32 iterates on the small Gram matrix XXᵀ alone and multiplies X once: the same polynomial in
exact arithmetic, and about half the work.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

JORDAN: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),)
"""Jordan (2024): steepest at zero; singular values end between about 0.7 and 1.2."""
_POLAR_SAFETY = 1.01
_POLAR: tuple[Coefficients, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),
)
"""Amsel et al. (2025), algorithm 1: optimal polynomials in turn for singular values in [0.001, 1]."""


def coefficients_of(name: str | Sequence[Coefficients], steps: int) -> list[Coefficients]:
    """The triples (a, b, c) of `steps` iterations; the last one given repeats.

    For "polar", all but the last are taken for values 1% larger, so that rounding cannot push one out of range.
    """
    table = {"jordan": JORDAN, "polar": _POLAR}.get(name, ()) if isinstance(name, str) else tuple(name)
    if not table:
        raise ValueError(f"unknown coefficients {name!r}; known: jordan, polar, or triples")
    chosen = [table[min(step, len(table) - 1)] for step in range(steps)]
    if name == "polar":
        s = _POLAR_SAFETY
        chosen = [*((a / s, b / s**3, c / s**5) for a, b, c in chosen[:-1]), chosen[-1]]
    return chosen


def orthogonalised(x: Tensor, coefficients: Iterable[Coefficients], eps: float = 1e-7) -> Tensor:
    """Nearly the nearest (semi-)orthogonal matrices to x [N, rows, cols], rows ≤ cols, in the dtype of x.

    Singular values are pushed towards 1 and singular vectors stay; a matrix of zeros stays zero.
    """
    triples = list(coefficients)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    if x.shape[-1] >= 2 * x.shape[-2] and x.dtype in (torch.float32, torch.float64):
        return _by_gram(x, triples)
    for a, b, c in triples:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: Tensor, triples: list[Coefficients]) -> Tensor:
    """The product of the polynomials in XXᵀ, which all commute, times X."""
    gram = torch.bmm(x, x.mT)
    product: Tensor | None = None
    for index, (a, b, c) in enumerate(triples):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else torch.bmm(factor, product)
        if index + 1 < len(triples):
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    assert product is not None
    return torch.bmm(product, x)


SCALES: dict[str, Callable[[int, int], float]] = {
    "rms": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "jordan": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}
"""The factor on an orthogonal update of rows × cols. rms: an entry's root mean square becomes 0.2, about AdamW's."""


class _Stack:
    """Matrices of one shape and learning rate, some of them transposed so that rows ≤ cols.

    `matrices` are parameters [rows, cols] or [E, rows, cols]; a stack counts the matrices in them one by one.
    """

    def __init__(self, names: list[str], matrices: list[Tensor], lr: float, scale: str) -> None:
        self.names, self.matrices, self.lr = names, matrices, lr
        self.tall = [m.shape[-2] > m.shape[-1] for m in matrices]
        self.counts = [1 if m.dim() == 2 else m.shape[0] for m in matrices]
        short, long = sorted(matrices[0].shape[-2:])
        like = matrices[0]
        self.momentum = torch.zeros(sum(self.counts), short, long, dtype=like.dtype, device=like.device)
        self.work = torch.empty_like(self.momentum)
        factors = [SCALES[scale](*m.shape[-2:]) for m in matrices]
        self.alphas = {alpha: [i for i, f in enumerate(factors) if f == alpha] for alpha in dict.fromkeys(factors)}

    def gradients(self) -> Tensor:
        """The gradients as one tensor [N, rows, cols]; an absent one counts as zero."""
        parts = [torch.zeros_like(m) if m.grad is None else m.grad for m in self.matrices]
        parts = [part.mT if tall else part for part, tall in zip(parts, self.tall, strict=True)]
        return torch.cat([part if part.dim() == 3 else part[None] for part in parts], out=self.work)

    def apart(self, stacked: Tensor) -> list[Tensor]:
        """What belongs to each parameter in a tensor [N, rows, cols], in its own shape, as views."""
        own = zip(torch.split(stacked, self.counts), self.matrices, self.tall, strict=True)
        turned = ((part.mT if tall else part, matrix) for part, matrix, tall in own)
        return [part if matrix.dim() == 3 else part[0] for part, matrix in turned]

    def moments(self) -> dict[str, Tensor]:
        """Each parameter's momentum in its own shape, as views."""
        return dict(zip(self.names, self.apart(self.momentum), strict=True))


class Muon:
    """Muon over named matrices. The caller clears gradients.

    Args:
        matrices: name, parameter [rows, cols] or [E, rows, cols], learning rate at the schedule's peak.
        momentum: μ.
        nesterov: look ahead by one momentum step.
        weight_decay: λ, decoupled; it is multiplied by the learning rate.
        coefficients: of each iteration in turn.
        scale: a key of `SCALES`.
        dtype: of the iterations; the parameters' own where None.
    """

    def __init__(
        self,
        matrices: Iterable[tuple[str, Tensor, float]],
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        coefficients: Sequence[Coefficients] = JORDAN * 5,
        scale: str = "rms",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.mu, self.nesterov, self.weight_decay = momentum, nesterov, weight_decay
        self.coefficients, self.dtype = list(coefficients), dtype
        groups: dict[tuple[int, int, float], list[tuple[str, Tensor]]] = {}
        for name, matrix, lr in matrices:
            if matrix.dim() not in (2, 3):
                raise ValueError(f"Muon is for matrices; {name} has shape {list(matrix.shape)}")
            short, long = sorted(matrix.shape[-2:])
            groups.setdefault((short, long, lr), []).append((name, matrix))
        self.stacks = [
            _Stack([name for name, _ in group], [matrix for _, matrix in group], lr, scale)
            for (_, _, lr), group in groups.items()
        ]

    @torch.no_grad()
    def step(self, ratio: float = 1.0) -> None:
        """One update at `ratio` of every learning rate."""
        for stack in self.stacks:
            update = stack.gradients()
            stack.momentum.lerp_(update, 1 - self.mu)
            update = update.lerp_(stack.momentum, self.mu) if self.nesterov else stack.momentum
            update = orthogonalised(update if self.dtype is None else update.to(self.dtype), self.coefficients)
            self._apply(stack, update, stack.lr * ratio)

    def _apply(self, stack: _Stack, update: Tensor, lr: float) -> None:
        if self.weight_decay:
            torch._foreach_mul_(stack.matrices, 1 - lr * self.weight_decay)
        parts = stack.apart(update.to(stack.momentum.dtype))
        for alpha, members in stack.alphas.items():
            torch._foreach_add_([stack.matrices[i] for i in members], [parts[i] for i in members], alpha=-lr * alpha)

    def moments(self) -> dict[str, Tensor]:
        """All state as views named `PARAMETER/momentum`, which loading may write to."""
        return {f"{name}/momentum": view for stack in self.stacks for name, view in stack.moments().items()}
