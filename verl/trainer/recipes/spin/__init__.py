"""SPIN: DPO against the policy's own earlier self, which follows it as the reference."""
