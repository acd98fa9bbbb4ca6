"""One record for each family of models: how its runs are read, trained, evaluated and used."""
