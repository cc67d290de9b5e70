"""A distribution of lambda for each pair of classes, with parameters that a gradient reaches."""

import math

import torch
from torch import Tensor, nn

from utils.exchange import Exchange

# exp(4) = 55: beyond, lambda is 1/2 or 1 for all that float32 can tell.
LARGEST = 4.0
# Quantiles at which the mean of the distribution is taken.
POINTS = 512


def lambda_at(quantile: Tensor, shape: Tensor) -> Tensor:
    """lambda = 1 / (1 + ((1 - u) / u)^s), the quantile u of a distribution with s = exp(shape).

    Its odds are log-logistic. It is symmetric about 1/2, uniform for s = 1, and has the tails of
    Beta(1 / s, 1 / s), whose quantile has no closed form: near 0 both distribution functions go
    as lambda^(1 / s). A large s hardly mixes, a small one takes about half of each.

    Args:
        quantile: u, from 0 to 1; from 1/2 on lambda is the larger share, and rises with s.
        shape: of the same shape, or broadcast.
    """
    odds = torch.logit(quantile, eps=torch.finfo(quantile.dtype).eps)
    return torch.sigmoid(shape.exp() * odds)


class MixupPolicy(nn.Module):
    """shape(a, b) = shared + pair[a, b] for classes a and b, the same both ways around.

    All pairs move by the shared part, which learns from every sample; each adds its own.

    Args:
        classes: how many.
        alpha: where it starts: close to Beta(alpha, alpha) for all pairs, above 0.
        lr: of its Adam (Kingma and Ba, 2015): about the largest change of a parameter in an update.
        decay: lr * decay is the share of the way from its start that a parameter goes back in each
            update.
        device: that of the batches.
    """

    def __init__(self, classes: int, alpha: float, lr: float, decay: float = 0.0, device=None):
        super().__init__()
        self.start = min(max(-math.log(alpha), -LARGEST), LARGEST)
        self.shared = nn.Parameter(torch.tensor(self.start, device=device))
        # Used on and above the diagonal.
        self.pair = nn.Parameter(torch.zeros(classes, classes, device=device))
        self.decay = lr * decay
        # Fused: it leaves a step that is flagged by `found_inf` out without a look from the host.
        # Hypergradients are small, and updates few.
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-12, fused=True
        )

    def forward(self, targets: Tensor, partners: Tensor, quantile: Tensor) -> Tensor:
        """lambda, the larger share, (n,); differentiable. `targets` and `partners` are (n,) int64,
        `quantile` is (n,), 1/2 to 1."""
        pair = self.pair[torch.minimum(targets, partners), torch.maximum(targets, partners)]
        return lambda_at(quantile, self.shared + pair)

    def update(
        self, lam: Tensor, hypergradient: Tensor, bad: Tensor, exchange: Exchange | None = None
    ) -> None:
        """One step of Adam down the gradient that reaches the parameters through `lam`, added up
        over the ranks.

        Args:
            lam: from `forward`, with its graph; each rank's own.
            hypergradient: d loss / d lam, of the shape of `lam`. Where it is not finite on any
                rank, the step is bad.
            bad: () bool, the same on all ranks; the parameters and Adam stay as they are.
        """
        parameters = (self.shared, self.pair)
        own = torch.autograd.grad(lam, parameters, hypergradient.to(lam.dtype))
        flat = torch.cat([part.flatten() for part in own])
        if exchange is not None:
            flat = exchange.sum(flat)
        # What is not finite in any lambda is not in the sum of the shared part.
        bad = bad | ~torch.isfinite(flat).all()
        flat = torch.where(bad, 0.0, flat)
        self.shared.grad, self.pair.grad = flat[0], flat[1:].view(self.pair.shape)
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            back = torch.where(bad, 0.0, self.decay)
            self.shared.lerp_(torch.full_like(self.shared, self.start), back)
            self.pair.mul_(1 - back)
            self.shared.clamp_(-LARGEST, LARGEST)
            self.pair.clamp_(-LARGEST, LARGEST)

    @torch.no_grad()
    def mean_lambda(self) -> Tensor:
        """(classes, classes) on the CPU: the mean share of the larger part, 1/2 (half and half)
        to 1 (not mixed). The host waits."""
        shape = (self.shared + self.pair.triu() + self.pair.triu(1).T).cpu()
        quantile = 0.5 + (torch.arange(POINTS) + 0.5) / (2 * POINTS)
        mean = [lambda_at(quantile, row[:, None]).mean(1) for row in shape]
        return torch.stack(mean)

    def saved_tensors(self) -> dict[str, Tensor]:
        """The parameters and what Adam knows of them, under stable names."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for name, parameter in self.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
        return tensors

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse."""
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
            kept = [key for key in tensors if key.startswith(f"{name}/")]
            # What belongs to the steps lies beside its parameter, as fused Adam makes it.
            self.optimizer.state[parameter] = {
                key.partition("/")[2]: tensors[key].to(parameter.device, copy=True) for key in kept
            }
