"""What the words and numbers of a board mean, as it says itself."""

RANKS = """\
Ranks with `=` are shared. Defenses: by the undetected damage in their worst cell, then F1 there,
then mean F1 over the attacks, then mean relative TPS. One beats another if the first of these in
which they differ is better; they differ if the 95 % t-interval of the differences, paired by seed,
does not hold 0. One seed beats nobody. Order: of those left, the one with the best means that no
other one left beats. It shares the rank of the first of the group before it, unless that one beats
it. A broken run without a number for its damage (the model diverged, or no worker was left) counts
as more damage than any number. Not ranked: who lacks a cell of the complete set of the track, or a
seed of it, or has banned more than 1 % of the workers without an attack. Other seeds do not count.
Broken runs are those under attack that ended in the outcome `broken`, attackers found or not.
"""

DEFINITIONS = """\
* Mean ± half width of the 95 % t-interval over the seeds of the valid cells; no interval below two.
* Precision, recall, F1: percent, over workers; positive = banned, truth = attacker that acted
  before its ban. Nobody acted: 100/100/100 without a ban, 0/100/0 with one.
* Knowledge: what the attackers see: their own signals; those of colluders, or of all honest
  replicas of their stage; what the detector would say; a copy of the model.
* Harm-weighted recall: recall in which each attacker counts by what it did in each step until its
  ban: corrupted signals x their mean |sent - honest| / (|sent - honest| + |honest|).
* Undetected damage: the excess loss if recall is below a half, else 0.
* Damage-weighted recall: recall over attacks, each counted by its excess loss without a defense.
* Attack success: how often a backdoor's trigger is followed by its target, percent; before: at the
  end of the honest warm-up.
* Detection steps: from an attacker's first corrupted signal to its ban, inclusive.
* False bans: workers banned that had not acted.
* Validation loss: nats per token on held-out text. Excess loss: less that of the same seeds with
  no attack and no defense. Relative TPS: training speed over that of the same paired run; `busy`
  where the interval is wider than ± 0.5: the machine did something else beside.
* Cost: floating-point operations that the defense adds to a training step, as a share of those of
  a plain step; bytes that travel between machines because of it; bytes that it keeps from step to
  step. Counted in honest steps; pipeline/cost.py says what counts.
* Capacity: smallest share of workers not banned, over the stages, at the end.
* Outcome: `broken` if the run diverged, the excess loss is above 0.05, capacity is below a half,
  or, without an attack, more than 1 % of the workers were banned; `invalid` if a run says nothing.
"""
