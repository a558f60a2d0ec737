"""Pipeline schedules: the actions of every device in order, whether they can run, and when they
end; which layers a stage gets is passes.stages."""
