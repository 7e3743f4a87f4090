"""All that tells a launcher about a rank: its heartbeat, hooks in torch, call sites, throughput, records of collectives."""
