"""Stage render: from a strategy's name to the DeepSpeed JSON that training reads."""
