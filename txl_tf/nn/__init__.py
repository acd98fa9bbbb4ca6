"""The base classes of layers, and parts that models share: embedding, softmax, feed-forward net, norms, positions."""
