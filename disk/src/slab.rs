//! Values under small numbers that are used again. Sized at the beginning, grown if that was too small.

use crate::size::in_memory;

/// Values of one type, each under the number that [`Slab::insert`] returned.
#[derive(Debug)]
pub struct Slab<T> {
    values: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    /// An empty slab with room for `size` values.
    pub fn with_capacity(size: usize) -> Slab<T> {
        Slab { values: Vec::with_capacity(size), free: Vec::with_capacity(size) }
    }

    /// Keeps `value`; its number.
    #[inline(always)]
    pub fn insert(&mut self, value: T) -> u32 {
        let Some(number) = self.free.pop() else { return self.append(value) };
        // It is free; said so that nothing is seen to be dropped there, for which the value would be copied once more.
        if let Some(place @ None) = self.values.get_mut(place(number)) {
            *place = Some(value);
        }
        number
    }

    #[cold]
    fn append(&mut self, value: T) -> u32 {
        let Ok(number) = u32::try_from(self.values.len()) else { unreachable!("a slab of 2^32 values") };
        self.values.push(Some(value));
        number
    }

    /// The value under `number`.
    pub fn get(&self, number: u32) -> Option<&T> {
        self.values.get(place(number))?.as_ref()
    }

    /// The value under `number`, to be changed.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.values.get_mut(place(number))?.as_mut()
    }

    /// Gives the value back and frees its number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let place = self.values.get_mut(place(number))?;
        if place.is_some() {
            self.free.push(number);
        }
        place.take()
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.values.len() - self.free.len()
    }

    /// All values, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.values.iter().flatten()
    }
}

impl<T> Default for Slab<T> {
    fn default() -> Slab<T> {
        Slab::with_capacity(0)
    }
}

fn place(number: u32) -> usize {
    in_memory(number.into())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn numbers_are_used_again() {
        let mut slab = Slab::with_capacity(2);
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!(slab.remove(a), Some('a'));
        assert_eq!(slab.remove(a), None);
        assert_eq!(slab.insert('c'), a);
        assert_eq!((slab.get(a), slab.get(b), slab.len()), (Some(&'c'), Some(&'b'), 2));
    }
}
