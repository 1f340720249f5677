"""Quality of a served model on data sets with judgements: `penstock eval`."""
