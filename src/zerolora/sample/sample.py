"""Stage sample: samples answers of a model to the prompts of a data set's training rows.

zerolora stage sample NAME
"""
