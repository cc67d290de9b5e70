"""Optimizers, parameter groups and schedules.

entry.py says what other code knows of an optimizer, table.py lists them, factory.py makes them.
sgd.py, adamw.py, lamb.py, madgrad.py, muon.py, novograd.py, apex.py and ngd/entry.py are read by
--help, so they do not import PyTorch; *_steps.py and ngd/ have the classes. multi_tensor.py helps
to write a class, found_inf.py makes any class skip steps, and lookahead.py wraps one.
"""
