"""The formulas of the optimizers for one parameter, in plain float64, step by step."""


class Sgd:
    """g' = g + wd p;  b = m b + g', from b = 0;  p = p - lr (g' + m b)."""

    def __init__(self, momentum):
        self.momentum, self.buffer = momentum, 0.0

    def step(self, p, g, lr, decay):
        g = g + decay * p
        self.buffer = self.momentum * self.buffer + g
        return p - lr * (g + self.momentum * self.buffer)


class AdamW:
    """p = p - lr wd p - lr m' / (sqrt(v') + eps), with m' and v' corrected for their start at 0."""

    eps = 1e-8

    def __init__(self, momentum):
        self.m, self.v, self.t = 0.0, 0.0, 0

    def direction(self, g):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return m / (v.sqrt() + self.eps)

    def step(self, p, g, lr, decay):
        return p - lr * decay * p - lr * self.direction(g)


class Lamb(AdamW):
    """You et al. (2020), algorithm 2: u = m' / (sqrt(v') + eps) + wd p;  p = p - lr |p| / |u| u.
    The scaling |p| / |u| is left out where there is no weight decay, or where |p| is 0."""

    eps = 1e-6

    def step(self, p, g, lr, decay):
        u = self.direction(g) + decay * p
        return p - lr * (p.norm() / u.norm() if decay and p.norm() > 0 else 1.0) * u


class Madgrad:
    """Defazio and Jelassi (2022), algorithm 1: a = lr sqrt(t);  s = s + a g;  v = v + a g^2;
    p = m p + (1 - m) (p_0 - s / (cbrt(v) + eps)). As in their program lr is larger by eps, and
    without momentum p_0 is recovered from the present p."""

    def __init__(self, momentum):
        self.momentum, self.start, self.s, self.v, self.t = momentum, None, 0.0, 0.0, 0

    def step(self, p, g, lr, decay):
        if self.start is None or not self.momentum:
            self.start = p + self.s / (self.v ** (1 / 3) + 1e-6)
        self.t += 1
        g, a = g + decay * p, (lr + 1e-6) * self.t**0.5
        self.s, self.v = self.s + a * g, self.v + a * g * g
        z = self.start - self.s / (self.v ** (1 / 3) + 1e-6)
        return self.momentum * p + (1 - self.momentum) * z


class NovoGrad:
    """n = |g|;  v = sqrt(0.999 v^2 + 0.001 n^2), at first n;  m = 0.9 m + 0.1 g;
    p = p - lr (m' / (v' + eps) + wd p), with m' = m / (1 - 0.9^t), v' = v / sqrt(1 - 0.999^t)."""

    def __init__(self, momentum):
        self.m, self.v, self.t = 0.0, None, 0

    def step(self, p, g, lr, decay):
        self.t += 1
        n = g.square().sum().sqrt()
        self.v = n if self.v is None else (0.999 * self.v**2 + 0.001 * n**2).sqrt()
        self.m = 0.9 * self.m + 0.1 * g
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t) ** 0.5
        return p - lr * (m / (v + 1e-8) + decay * p)


class Lookahead:
    """Zhang et al. (2019), algorithm 1: after every k steps s = s + (p - s) / 2;  p = s."""

    def __init__(self, inner, k):
        self.inner, self.k, self.slow, self.t = inner, k, None, 0

    def step(self, p, g, lr, decay):
        self.slow = p if self.slow is None else self.slow
        p = self.inner.step(p, g, lr, decay)
        self.t += 1
        if self.t % self.k == 0:
            self.slow = p = self.slow + (p - self.slow) / 2
        return p
