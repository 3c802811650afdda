"""`tlt doctor`: would `tlt serve` with these flags work here? Reads and asks, and changes nothing."""
