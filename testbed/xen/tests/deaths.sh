# Processes of disks of every kind die under a front end of our own, by kills and of a request; the next ones take its rings over.
images 192
front_end ${deaths:-deaths::}
