"""Plans of trials: their factors, the ledger of what ran, sweeps and bisections."""
