"""`tlt doctor`: would `tlt serve` with these flags work here? It changes nothing."""
