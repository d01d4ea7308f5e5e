"""The ledger: offer, seal, ready, commit, account, rollback. Pure rules and guarded transactions."""
