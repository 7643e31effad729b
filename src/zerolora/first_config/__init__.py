"""The first config of a project, from a model, a file of rows and this machine."""
