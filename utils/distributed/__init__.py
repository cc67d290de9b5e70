"""Training with many processes: the group they form (group.py), what they tell each other
(exchange.py), how the model is spread over them (strategies.py), and their launch (launch.py).

`torch.distributed` appears here and nowhere else.
"""
