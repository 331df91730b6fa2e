"""The standing test of the promise that monitoring leaves a training as it is.

Trainings are drawn from a seed: a model, a trainer, and traits such as weight noise, hooks, spectral norms, lazy
layers, activation checkpointing or a teacher in evaluation mode. Each runs twice, without the monitor and with a
reading at every step, and everything that can be compared is: losses, gradients, weights, optimizers, every random
state, how often every function of the user's was called, hooks, flags and warnings.

    python -m pytest tests/promise                         a few dozen, from the seed of every run of the tests
    python -m tests.promise --runs 500                     more of them, from a fresh seed
    python -m tests.promise --training "fused / loop / dropout, user hooks / 3"      one of them
"""
