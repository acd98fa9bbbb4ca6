"""A scheme of positions as a user writes one: T5's (Raffel et al. 2020, section 2.1), a learned score for distances.

`position_schemes_test.py` uses it. A program that opens a model with it imports this module.
"""

import math

import keras
import tensorflow as tf

import txl_tf


@txl_tf.layers.register_positions("t5")
class Buckets(txl_tf.layers.Positions, keras.layers.Layer):
    """Each head learns what it adds to a score for each bucket of distances; buckets of far distances are wider."""

    n_bucket, farthest = 8, 20

    def make_weights(self, owner):
        self.table = self.add_weight(name="table", shape=(self.n_bucket, owner.n_head), initializer="zeros")

    def scores(self, q, places):
        distances = tf.maximum(places.distances(q), 0)  # [T, K]
        exact = self.n_bucket // 2
        log = tf.math.log(tf.cast(tf.maximum(distances, exact), tf.float32) / exact) / math.log(self.farthest / exact)
        wide = tf.minimum(exact + tf.cast(log * (self.n_bucket - exact), tf.int32), self.n_bucket - 1)
        buckets = tf.where(distances < exact, distances, wide)
        return tf.cast(tf.gather(tf.transpose(self.table), buckets, axis=1), q.dtype)  # [H, T, K]
