"""Programs on a Ray cluster: training, preparation and answers to many files. Ray schedules; the extra is `cluster`."""
