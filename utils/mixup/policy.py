"""A distribution of lambda for each pair of classes, with differentiable parameters."""

import math

import torch
from torch import Tensor, nn

from ..exchange import Exchange

# Bound of |shared| and of |pair|, which add up to log s: s from 1 / 55 to 55 for either alone, far
# beyond useful values.
MAX_LOG_S = 4.0
# Number of quantiles from which the mean of the distribution is computed.
POINTS = 512
# Samples of a pair of classes that it takes to tell its derivative from noise: that of all pairs
# together took about as many (benchmarks/results/mixup.md).
SAMPLES_PER_PAIR = 1000


def can_tell_pairs_apart(classes: int, samples: int, updates: int, decay: float) -> bool:
    """Whether a run has enough samples of every pair of classes to learn something about it.

    Args:
        samples: that an update uses, of all classes.
        updates: in the whole run.
        decay: fraction of what was learned that each update takes back.
    """
    remembered = min(updates, 1 / decay) if decay else updates
    return remembered * samples >= SAMPLES_PER_PAIR * classes * (classes + 1) / 2


def lambda_at(probability: Tensor, log_s: Tensor) -> Tensor:
    """lambda = 1 / (1 + ((1 - u) / u)^s), the u-quantile of a distribution with s = exp(log_s).

    The odds of lambda are log-logistic. The distribution is symmetric about 1/2, uniform for s = 1,
    and has the tails of Beta(1 / s, 1 / s), whose quantile function has no closed form: near 0 both
    cumulative distributions behave as lambda^(1 / s). A large s hardly mixes, a small s mixes about
    half and half.

    Args:
        probability: u, from 0 to 1; for u > 1/2 lambda is above 1/2 and grows with s.
        log_s: of the same shape or broadcastable.
    """
    odds = torch.logit(probability, eps=torch.finfo(probability.dtype).eps)
    return torch.sigmoid(log_s.exp() * odds)


class MixupPolicy(nn.Module):
    """log s(a, b) = shared + pair[a, b] for classes a and b, symmetric in a and b.

    `shared` learns from every sample, `pair` only from samples of its two classes.

    Args:
        classes: number of classes.
        alpha: initially lambda is close to Beta(alpha, alpha) for all pairs; above 0. Values below
            1 / 55 count as 1 / 55, those above 55 as 55.
        lr: Adam's (Kingma and Ba, 2015): about the largest change of a parameter in an update.
        decay: each update moves a parameter back towards its start by lr * decay of the distance.
        device: that of the batches.
        learns_pairs: `pair` learns; else it stays 0. Tensors that are loaded with a `pair` that has
            learned let it go on.
    """

    def __init__(
        self,
        classes: int,
        alpha: float,
        lr: float,
        decay: float = 0.0,
        device=None,
        learns_pairs: bool = True,
    ):
        super().__init__()
        self.learns_pairs = learns_pairs
        self.start = min(max(-math.log(alpha), -MAX_LOG_S), MAX_LOG_S)
        self.shared = nn.Parameter(torch.tensor(self.start, device=device))
        # Only the upper triangle is used.
        self.pair = nn.Parameter(torch.zeros(classes, classes, device=device))
        self.decay = lr * decay
        # fused: skips a step with `found_inf` without a host sync. Hypergradients are small, hence
        # eps; updates are few, hence the second beta.
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=lr, betas=(0.9, 0.99), eps=1e-12, fused=True
        )

    def forward(self, targets: Tensor, partners: Tensor, probability: Tensor) -> Tensor:
        """lambda, (n,), at least 1/2; differentiable. `targets` and `partners` are (n,) int64,
        `probability` is (n,), 1/2 to 1 (see `lambda_at`)."""
        pair = self.pair[torch.minimum(targets, partners), torch.maximum(targets, partners)]
        return lambda_at(probability, self.shared + pair)

    def update(
        self, lam: Tensor, hypergradient: Tensor, bad: Tensor, exchange: Exchange | None = None
    ) -> None:
        """One Adam step along the gradient through `lam`, summed over the ranks.

        Args:
            lam: from `forward`, with its graph; each rank's own.
            hypergradient: d loss / d lam, in the shape of `lam`. If it is not finite on any rank,
                the update is skipped.
            bad: () bool, the same on all ranks; where true, the update is skipped.
        """
        parameters = (self.shared, self.pair)
        gradients = torch.autograd.grad(lam, parameters, hypergradient.to(lam.dtype))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        if exchange is not None:
            flat = exchange.sum(flat)
        # A non-finite value for any lambda makes the gradient of `shared` non-finite.
        bad = bad | ~torch.isfinite(flat).all()
        flat = torch.where(bad, 0.0, flat)
        self.shared.grad = flat[0]
        self.pair.grad = flat[1:].view(self.pair.shape) * float(self.learns_pairs)
        self.optimizer.found_inf = bad.float()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            back = torch.where(bad, 0.0, self.decay)
            self.shared.lerp_(torch.full_like(self.shared, self.start), back)
            self.pair.mul_(1 - back)
            self.shared.clamp_(-MAX_LOG_S, MAX_LOG_S)
            self.pair.clamp_(-MAX_LOG_S, MAX_LOG_S)

    @torch.no_grad()
    def mean_lambda(self) -> Tensor:
        """(classes, classes) on the CPU: mean of max(lambda, 1 - lambda), from 1/2 (half and half)
        to 1 (not mixed). Synchronizes the host with the device."""
        log_s = (self.shared + self.pair.triu() + self.pair.triu(1).T).cpu()
        probability = 0.5 + (torch.arange(POINTS) + 0.5) / (2 * POINTS)
        mean = [lambda_at(probability, row[:, None]).mean(1) for row in log_s]
        return torch.stack(mean)

    def saved_tensors(self) -> dict[str, Tensor]:
        """The parameters and Adam's state, under stable names."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for name, parameter in self.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{name}/{key}"] = value
        return tensors

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `saved_tensors`. Synchronizes the host with the device."""
        self.learns_pairs = self.learns_pairs or bool(tensors["pair"].any())
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])
            keys = [key for key in tensors if key.startswith(f"{name}/")]
            # All on the parameter's device, the step count too, as fused Adam creates it.
            self.optimizer.state[parameter] = {
                key.partition("/")[2]: tensors[key].to(parameter.device, copy=True) for key in keys
            }
