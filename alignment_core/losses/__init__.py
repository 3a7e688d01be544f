"""Losses: pure functions of tensors. They import nothing but torch, and types of settings.

Suffixes of tensors and arrays name their axes, here and wherever batches are made for the losses:

==========  ==============================================================================================================
``_B``      rows of a data set
``_P``      pairs of a chosen and a rejected completion
``_S``      sequences: a prompt with a completion
``_T``      tokens of completions, observations of environments included
``_N``      all tokens of a batch, prompts included
``_K``      target tokens, which are trained on: those of all sequences of the batch, one after the other
``_V``      the vocabulary
``_C``      candidates: tokens that could stand in the place of a target; all others may be one more
``_R``      rewards of a recipe
``_U``      reasoning steps that have a reward of their own
``_M``      measured units, to which a bound applies: target tokens or sequences
==========  ==============================================================================================================
"""
