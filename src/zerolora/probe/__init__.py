"""Measure the machines that training is planned for."""
