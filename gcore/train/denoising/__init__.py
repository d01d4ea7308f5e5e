"""Training of policies that generate pictures: trained denoising steps as rows of micro-batches, their objectives, and the
networks of a rank.

Read `rows` first.
"""
