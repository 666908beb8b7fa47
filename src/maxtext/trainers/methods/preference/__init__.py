"""Preference optimization: DPO, its relatives and ORPO."""
