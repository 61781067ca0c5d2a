"""SPPO: log-ratios that follow the reward above its baseline. Settings alone, no stage."""
