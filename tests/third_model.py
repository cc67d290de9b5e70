"""A model that no other part of the toolkit knows."""

from torch import Tensor, nn


class Perceptron(nn.Module):
    HEAD = "classify"

    def __init__(self, inputs: int, hidden: int, classes: int):
        super().__init__()
        self.hide = nn.Linear(inputs, hidden)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, pictures: Tensor) -> Tensor:  # (batch, channels, height, width)
        return self.classify(self.hide(pictures.flatten(1)).relu())
