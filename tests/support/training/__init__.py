"""What tests train: models, data sets and strategies, and comparisons of the results."""
