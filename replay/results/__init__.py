"""What came of it: the results file, its reports and comparisons."""
