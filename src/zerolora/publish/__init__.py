"""`zerolora push`: a finished run's adapter or merged model, with a model card, to a hub repository or a directory."""
