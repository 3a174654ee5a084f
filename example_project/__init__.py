"""Invoices: a small application with Celery, RQ and one ledger that share leases."""
