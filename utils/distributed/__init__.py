"""Training with many processes: the group they form (group.py), what they tell each other
(exchange.py), and how the model is spread over them (strategies/).

`torch.distributed` appears here and in `utils/launch/`, and nowhere else.
"""
