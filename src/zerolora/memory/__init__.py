"""Stage estimate: predicts the memory of training from config.json alone."""
