"""Optimizers, parameter groups and schedules.

entry.py says what other code knows of an optimizer, table.py lists them, factory.py makes them.
sgd.py, adamw.py, lamb.py, madgrad.py, muon.py, novograd.py, apex.py and ngd/entry.py are read by
--help, so they do not import PyTorch. The classes of sgd and adamw are PyTorch's, those of apex.py
NVIDIA Apex's. norm_steps.py has those of lamb and novograd, muon_steps.py and madgrad_steps.py one
each, ngd/optimizer.py that of ngd. multi_tensor.py helps to write a class, found_inf.py makes any
class skip steps, and lookahead.py wraps one.
"""
