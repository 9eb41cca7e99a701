//! Formats numbers and times in few characters, and texts in one line.
//!
//! Invariant: no number or time is wider than [`WIDTH`].

/// Puts a text from outside on one line, with invisible and control characters made visible.
pub fn in_one_line(text: &str) -> String {
    api::visible(&text.replace(['\n', '\t'], " ")).into_owned()
}

/// The maximum width of a number or time.
pub const WIDTH: usize = 6;

const SECOND: f64 = 1e9;

/// Formats a non-negative number: `0.25`, `12.5`, `9999`, `123k`.
pub fn number(value: f64) -> String {
    match value {
        _ if value.is_nan() => "-".into(),
        v if v < 0.005 => "0".into(),
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v if v < 9_999.5 => format!("{v:.0}"),
        v => ["k", "M", "G", "T"]
            .iter()
            .zip([1e3, 1e6, 1e9, 1e12])
            .map(|(unit, factor)| (unit, v / factor))
            .find(|(_, v)| *v < 999.5)
            .map_or_else(
                || ">999T".into(),
                |(unit, v)| if v < 99.95 { format!("{v:.1}{unit}") } else { format!("{v:.0}{unit}") },
            ),
    }
}

/// Formats a count as a whole number if it fits.
pub fn count(value: f64) -> String {
    if value < 9_999.5 { format!("{value:.0}") } else { number(value) }
}

/// Formats a duration in nanoseconds: `850ns`, `12.5µs`, `1.25ms`, `3.20s`, `4m10s`, `2h05m`, `12d`.
pub fn duration(ns: f64) -> String {
    let seconds = ns / SECOND;
    match ns {
        _ if ns.is_nan() => "-".into(),
        ns if ns < 999.5 => format!("{ns:.0}ns"),
        ns if ns < 999_500.0 => with_unit(ns / 1e3, "µs"),
        ns if ns < 999_500_000.0 => with_unit(ns / 1e6, "ms"),
        _ if seconds < 99.95 => with_unit(seconds, "s"),
        _ if seconds < 5999.5 => format!("{:.0}m{:02.0}s", (seconds / 60.0).floor(), (seconds % 60.0).floor()),
        _ if seconds < 359_999.5 => {
            format!("{:.0}h{:02.0}m", (seconds / 3600.0).floor(), (seconds % 3600.0 / 60.0).floor())
        }
        _ if seconds < 8.64e8 => format!("{:.0}d", seconds / 86_400.0),
        _ => ">9999d".into(),
    }
}

fn with_unit(value: f64, unit: &str) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}{unit}"),
        v if v < 99.95 => format!("{v:.1}{unit}"),
        v => format!("{v:.0}{unit}"),
    }
}

#[cfg(test)]
mod test {
    use unicode_width::UnicodeWidthStr;

    use super::*;

    #[test]
    fn numbers_and_durations_fit_their_column_whatever_they_are() {
        let mut value = 0.0001;
        while value < 1e40 {
            for near in [value * 0.9994, value * 0.9996, value, value * 1.07] {
                assert!(number(near).width() <= WIDTH, "{near}: {}", number(near));
                assert!(duration(near).width() <= WIDTH, "{near}: {}", duration(near));
                assert!(count(near).width() <= WIDTH, "{near}: {}", count(near));
            }
            value *= 1.0 + 1.0 / 7.0;
        }
        for value in [0.0, 9.995, 99.95, 9999.5, 999_500.0, f64::INFINITY, f64::NAN, 5999.5e9, 359_999.5e9] {
            assert!(number(value).width() <= WIDTH && duration(value).width() <= WIDTH, "{value}");
        }
    }

    #[test]
    fn numbers_and_durations_keep_three_digits_where_there_is_room() {
        let shown = [0.0, 0.25, 12.5, 9999.0, 12_345.0, 123_456.0, 2.5e9].map(number);
        assert_eq!(shown, ["0", "0.25", "12.5", "9999", "12.3k", "123k", "2.5G"]);
        let shown = [850.0, 12_500.0, 1.25e6, 3.2e9, 250e9, 7500e9, 1e15].map(duration);
        assert_eq!(shown, ["850ns", "12.5µs", "1.25ms", "3.20s", "4m10s", "2h05m", "12d"]);
    }
}
