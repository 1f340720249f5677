"""`penstock embed`: the texts of a file in, their vectors out, to be interrupted and gone on with."""
