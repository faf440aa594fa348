"""What is kept: sharded data sets and the states of trials."""
