"""Training: `fit` and `evaluate` of models with and without memory, optimizers, strategies of `tf.distribute`."""
