"""How good a classifier is: accuracy, F1, AUROC and others, and how sure these figures are.

table.py names the measures, without PyTorch; tally.py counts over batches and ranks what they are
made of; compute.py makes values and intervals of the counts; measures.py puts together what a run
measures, with functions of the user's.
"""
