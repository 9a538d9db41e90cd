"""Random training programs: how they are grown, run in two ways, compared and made smaller."""
