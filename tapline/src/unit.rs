//! Formats durations for users.

const UNITS: [(&str, f64); 3] = [("s", 1e9), ("ms", 1e6), ("µs", 1e3)];

/// Formats a duration in nanoseconds: `850 ns`, `12.5 µs`, `3.0 ms`, `3.2 s`, `125 s`.
pub fn time(ns: f64) -> String {
    // A value that would be rounded up to the next unit is shown in that unit.
    match UNITS.iter().find(|(_, factor)| ns >= factor * 0.9995) {
        Some((unit, factor)) if ns >= factor * 99.95 => format!("{:.0} {unit}", ns / factor),
        Some((unit, factor)) => format!("{:.1} {unit}", ns / factor),
        None => format!("{ns:.0} ns"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn durations_have_the_unit_that_suits_them() {
        let shown = [0.0, 850.0, 999.6, 12_500.0, 3e6, 999.96e6, 3.2e9, 125e9].map(time);
        assert_eq!(shown, ["0 ns", "850 ns", "1.0 µs", "12.5 µs", "3.0 ms", "1.0 s", "3.2 s", "125 s"]);
    }
}
