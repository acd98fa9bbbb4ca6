"""What every layer is made of: Keras's habits, dropout, gradients, products."""
