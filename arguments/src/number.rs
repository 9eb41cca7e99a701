//! Whole numbers on the command line.

use std::ops::RangeInclusive;

/// Parses a whole number in a range.
pub fn number<T: TryFrom<u64> + Clone + Send + Sync + 'static>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |word| {
        let number = word.parse::<u64>().ok().filter(|number| range.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| match *range.end() {
            u64::MAX => format!("give a whole number, {} or more", range.start()),
            end => format!("give a whole number from {} to {end}", range.start()),
        })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_number_is_in_its_range_or_refused_with_it() {
        let processors = number::<u8>(1..=255);
        assert_eq!((processors("1"), processors("255")), (Ok(1), Ok(255)));
        for word in ["0", "256", "many", "-1", "1.5", ""] {
            assert_eq!(processors(word).unwrap_err(), "give a whole number from 1 to 255", "{word}");
        }
        assert_eq!(number::<u32>(0..=u64::MAX)("5000000000").unwrap_err(), "give a whole number, 0 or more");
    }
}
