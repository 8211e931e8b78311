//! The grey value of pixels: r, g and b by the weights of torchvision, rounded down to a byte.

/// The weights 0.2989, 0.587 and 0.114 in parts of 2^24.
const WEIGHTS: [u32; 3] = [5_014_703, 9_848_226, 1_912_603];

/// Return the grey value of a pixel.
#[inline(always)]
pub fn grey_byte([r, g, b]: &[u8; 3]) -> u8 {
    ((u32::from(*r) * WEIGHTS[0] + u32::from(*g) * WEIGHTS[1] + u32::from(*b) * WEIGHTS[2]) >> 24) as u8
}

/// Give the three channels of all pixels their grey value.
pub fn make_grey(pixels: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("sse4.1") {
        // SAFETY: the processor has these instructions.
        return unsafe { x86::make_grey(pixels) };
    }
    each_grey(pixels);
}

fn each_grey(pixels: &mut [u8]) {
    pixels.as_chunks_mut::<3>().0.iter_mut().for_each(|pixel| *pixel = [grey_byte(pixel); 3]);
}

/// Four pixels at a time. Compilers do not find these instructions, because pixels have three bytes.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::array::from_fn;

    use super::{WEIGHTS, each_grey};

    #[target_feature(enable = "sse4.1")]
    pub fn make_grey(pixels: &mut [u8]) {
        let (groups, rest) = pixels.as_chunks_mut::<12>();
        for group in groups {
            let thrice = _mm_setr_epi8(0, 0, 0, 4, 4, 4, 8, 8, 8, 12, 12, 12, -1, -1, -1, -1);
            let bytes = _mm_shuffle_epi8(greys(group), thrice);
            group[..8].copy_from_slice(&_mm_cvtsi128_si64(bytes).to_le_bytes());
            group[8..].copy_from_slice(&_mm_extract_epi32::<2>(bytes).to_le_bytes());
        }
        each_grey(rest);
    }

    /// Return the grey values of four pixels, 32 bits each.
    #[target_feature(enable = "sse4.1")]
    fn greys(group: &[u8; 12]) -> __m128i {
        let (low, high) =
            (i64::from_le_bytes(from_fn(|at| group[at])), i32::from_le_bytes(from_fn(|at| group[8 + at])));
        let pixels = _mm_set_epi64x(i64::from(high), low);
        let red_green =
            _mm_shuffle_epi8(pixels, _mm_setr_epi8(0, -1, 1, -1, 3, -1, 4, -1, 6, -1, 7, -1, 9, -1, 10, -1));
        let blue = _mm_shuffle_epi8(pixels, _mm_setr_epi8(2, -1, -1, -1, 5, -1, -1, -1, 8, -1, -1, -1, 11, -1, -1, -1));
        // One instruction multiplies pairs of 16-bit numbers and adds them. The weights have more bits, so they come in two parts.
        let [high, low] = [|weight: u32| weight >> 9, |weight: u32| weight & 511].map(|part| {
            let [r, g, b] = WEIGHTS.map(|weight| part(weight).cast_signed());
            let pairs = _mm_madd_epi16(red_green, _mm_set1_epi32(r | g << 16));
            _mm_add_epi32(pairs, _mm_madd_epi16(blue, _mm_set1_epi32(b)))
        });
        _mm_srli_epi32::<24>(_mm_add_epi32(_mm_slli_epi32::<9>(high), low))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_colours_become_the_same_grey_with_and_without_vector_instructions() {
        for r in 0..=255u8 {
            let colours = (0..=255u8).flat_map(|g| (0..=255u8).step_by(3).flat_map(move |b| [r, g, b]));
            let mut fast: Vec<u8> = colours.collect();
            let mut plain = fast.clone();
            make_grey(&mut fast);
            each_grey(&mut plain);
            assert!(fast == plain, "red {r}");
        }
    }

    #[test]
    fn any_number_of_pixels_becomes_grey() {
        for pixels in 0..20 {
            let before: Vec<u8> = (0..3 * pixels).map(|at| (at * 37 + 5) as u8).collect();
            let mut after = before.clone();
            make_grey(&mut after);
            let want: Vec<u8> = before.as_chunks::<3>().0.iter().flat_map(|pixel| [grey_byte(pixel); 3]).collect();
            assert_eq!(after, want);
        }
    }
}
