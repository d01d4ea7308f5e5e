"""Who gets which slots: policies behind one interface (`placement.policies.base`). Pure."""
