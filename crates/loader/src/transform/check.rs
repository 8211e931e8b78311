//! Whether a transform's parameters are valid, and whether the transform fits the results that it is applied to.

use penstock_codec::Mode;
use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

use crate::transform::cell::FORMATS;
use crate::transform::colour::is_colour;
use crate::transform::dtypes::is_unfit;
use crate::transform::operation::Operation;
use crate::transform::output::{Output, Role};
use crate::transform::warp::Affine;

/// Check a transform's parameters.
fn check_parameters(operation: &Operation) -> Result<()> {
    let name = operation.name();
    let wrong = |text: String| Err(Error::new("invalid-argument", format!("{name}: {text}")));
    let sizes = |size: &[usize], counts: &[usize]| {
        if size.contains(&0) || !counts.contains(&size.len()) {
            wrong(format!("size={size:?}, expected numbers above 0 in a list whose length is one of {counts:?}"))
        } else {
            Ok(())
        }
    };
    let chance = |p: f64| if (0.0..=1.0).contains(&p) { Ok(()) } else { wrong(format!("p={p}, expected 0 to 1")) };
    match operation {
        Operation::Resize { size, .. } => sizes(size, &[1, 2])?,
        Operation::CenterCrop { size } | Operation::RandomCrop { size, .. } => sizes(size, &[1, 2, 3, 4, 5, 6, 7, 8])?,
        Operation::RandomResizedCrop { size, scale, ratio, .. } => {
            sizes(size, &[2])?;
            let ordered = |range: &[f64; 2]| range[0] > 0.0 && range[0] <= range[1] && range[1].is_finite();
            if !ordered(scale) || !ordered(ratio) {
                return wrong(format!("scale={scale:?}, ratio={ratio:?}, expected (low, high) with 0 < low <= high"));
            }
        }
        Operation::RandomHorizontalFlip { p } | Operation::RandomVerticalFlip { p } => chance(*p)?,
        Operation::Normalize { mean, std }
            if mean.is_empty() || std.is_empty() || std.iter().any(|std| *std == 0.0 || !std.is_finite()) =>
        {
            return wrong(format!(
                "mean={mean:?}, std={std:?}, expected at least one number each, and finite, nonzero std"
            ));
        }
        Operation::ColorJitter { brightness, contrast, saturation, hue } => {
            let ranges =
                [(brightness, f64::INFINITY), (contrast, f64::INFINITY), (saturation, f64::INFINITY), (hue, 0.5)];
            for (range, most) in ranges {
                let least = if most == 0.5 { -0.5 } else { 0.0 };
                if range.is_some_and(|[low, high]| !(least <= low && low <= high && high <= most && high.is_finite())) {
                    return wrong(format!("the range {range:?} is not within {least} to {most}"));
                }
            }
        }
        Operation::Grayscale { p, .. } => chance(*p)?,
        Operation::GaussianBlur { kernel, sigma } => {
            let odd = kernel.iter().all(|size| size % 2 == 1);
            if !odd || sigma[0] <= 0.0 || sigma[0] > sigma[1] || !sigma[1].is_finite() {
                return wrong(format!("kernel={kernel:?}, sigma={sigma:?}, expected odd sizes, and 0 < low <= high"));
            }
        }
        Operation::RandomErasing { p, scale, ratio, .. } => {
            chance(*p)?;
            if !(0.0 <= scale[0] && scale[0] <= scale[1] && scale[1] <= 1.0 && 0.0 < ratio[0] && ratio[0] <= ratio[1]) {
                return wrong(format!(
                    "scale={scale:?}, ratio={ratio:?}, expected scale from 0 to 1, ratio above 0, and low <= high"
                ));
            }
        }
        Operation::RandomAffine(affine) => affine.wrong().map_or(Ok(()), wrong)?,
        Operation::ConvertBoxes { format } if !FORMATS.contains(&format.as_str()) => {
            return wrong(format!("format=`{format}`, expected one of {}", FORMATS.join(", ")));
        }
        Operation::TokenChunks { length: 0, .. } => return wrong("length=0, expected a number above 0".into()),
        _ => {}
    }
    Ok(())
}

/// Return why the values of a result cannot be those that an operation fills in, or None.
fn unfit_fill(operation: &Operation, output: &Output) -> Option<String> {
    let (what, fill) = match operation {
        Operation::Pad { fill, .. } | Operation::RandomCrop { fill, .. } => ("fill", *fill),
        Operation::TokenChunks { pad, .. } => ("pad", *pad),
        Operation::RandomAffine(affine) if output.role == Role::Mask => ("mask_fill", affine.mask_fill.into()),
        _ => return None,
    };
    let holds_values = matches!(output.role, Role::Image { .. } | Role::Mask | Role::Tensor);
    let dtype = if output.role == Role::Mask { Dtype::Uint8 } else { output.stored_dtype };
    (holds_values && is_unfit(fill, dtype))
        .then(|| format!("{what}={fill} does not fit `{}`, whose values are {}", output.name, dtype.name()))
}

/// Check a transform's parameters, and that the transform fits every result in `on`.
pub fn check(operation: &Operation, on: &[usize], outputs: &[Output]) -> Result<()> {
    check_parameters(operation)?;
    let name = operation.name();
    let wrong = |text: String| Err(Error::new("invalid-argument", format!("{name}: {text}")));
    for output in on.iter().map(|at| &outputs[*at]) {
        if let Some(text) = unfit_fill(operation, output) {
            return wrong(text);
        }
        if !fits(operation, output)? {
            let what = match &output.role {
                Role::Tensor => format!("a tensor with {} dimensions", output.shape.len()),
                Role::Image { .. } => "an image".into(),
                Role::Mask => "a mask".into(),
                Role::Boxes(_) => "boxes".into(),
                Role::Keypoints(_) => "keypoints".into(),
                Role::Other => "not an image, mask, boxes, keypoints or tensor".into(),
            };
            return Err(Error::new("invalid-argument", format!("{name} does not fit `{}`: it is {what}", output.name)));
        }
    }
    if on.iter().all(|at| outputs[*at].is_follower())
        && !matches!(operation, Operation::SanitizeBoundingBoxes { .. } | Operation::ConvertBoxes { .. })
    {
        return wrong(format!("`{}` follows an image, mask or tensor, but on= contains none", outputs[on[0]].name));
    }
    if matches!(operation, Operation::SanitizeBoundingBoxes { .. })
        && !on.iter().any(|at| matches!(outputs[*at].role, Role::Boxes(_)))
    {
        return wrong("on= contains no boxes".into());
    }
    Ok(())
}

/// Return whether a transform applies to a result of this kind and shape. What needs another explanation is an error.
fn fits(operation: &Operation, output: &Output) -> Result<bool> {
    Ok(match (operation, &output.role) {
        (_, Role::Other) => false,
        (_, Role::Image { .. } | Role::Tensor) if is_colour(operation) => {
            check_colour(operation, output)?;
            true
        }
        (Operation::Normalize { .. } | Operation::ToDtype { .. }, Role::Image { mode: Mode::Stored, .. }) => {
            let text = format!(
                "{} does not fit `{}`: images of mode \"stored\" differ in channels and bits",
                operation.name(),
                output.name
            );
            return Err(Error::new("invalid-argument", text)
                .hint("declare the column as ps.Image(mode=\"RGB\"), or with another mode"));
        }
        (Operation::Normalize { .. } | Operation::ToDtype { .. }, role) => {
            matches!(role, Role::Image { .. } | Role::Mask | Role::Tensor)
        }
        (Operation::Resize { .. } | Operation::RandomResizedCrop { .. }, Role::Tensor) => false,
        (Operation::RandomAffine(affine), Role::Image { .. } | Role::Tensor) => {
            check_affine(affine, output)?;
            output.shape.len() == 3
        }
        (Operation::ConvertBoxes { .. }, role) => matches!(role, Role::Boxes(_)),
        (Operation::SanitizeBoundingBoxes { .. }, role) => {
            matches!(role, Role::Boxes(_) | Role::Keypoints(_) | Role::Tensor)
        }
        (Operation::TokenChunks { .. }, role) => *role == Role::Tensor && output.shape.len() == 1,
        (Operation::CenterCrop { size } | Operation::RandomCrop { size, .. }, Role::Tensor) => {
            size.len() <= output.shape.len()
        }
        (Operation::CenterCrop { size } | Operation::RandomCrop { size, .. }, _) => size.len() == 2,
        (Operation::Pad { padding, .. }, Role::Tensor) => padding.len() / 2 <= output.shape.len(),
        (Operation::Pad { padding, .. }, _) => padding.len() == 4,
        (Operation::RandomHorizontalFlip { .. } | Operation::RandomVerticalFlip { .. }, Role::Tensor) => {
            output.shape.len() >= 2
        }
        _ => true,
    })
}

/// Check that a result has the shape and the dtype that colour transforms need.
fn check_colour(operation: &Operation, output: &Output) -> Result<()> {
    let channels = output.shape.get(2).copied().flatten();
    let fits = match operation {
        Operation::RandomErasing { value, .. } => channels.is_some_and(|channels| [1, channels].contains(&value.len())),
        _ => matches!(channels, Some(1 | 3)),
    };
    if fits && output.shape.len() == 3 && output.stored_dtype == Dtype::Uint8 {
        return Ok(());
    }
    let text =
        format!("{} does not fit `{}`: it needs images of 8 bits with 1 or 3 channels", operation.name(), output.name);
    Err(Error::new("invalid-argument", text)
        .hint("declare the column as ps.Image(), or as a uint8 tensor (height, width, 3)"))
}

/// Check that the pixels of a result can be moved, and can have the fill values of the transform.
fn check_affine(affine: &Affine, output: &Output) -> Result<()> {
    let wrong = |text: String| Err(Error::new("invalid-argument", format!("{}: {text}", affine.name())));
    let channels = output.shape.get(2).copied().flatten();
    if affine.fill.len() != 1 && channels != Some(affine.fill.len()) {
        let channels = channels.map_or("an unknown number of".into(), |channels| channels.to_string());
        return wrong(format!("fill has {} values, but `{}` has {channels} channels", affine.fill.len(), output.name));
    }
    if output.shape.len() == 3 && !matches!(output.stored_dtype, Dtype::Uint8 | Dtype::Uint16 | Dtype::Float32) {
        return wrong(format!(
            "`{}` is {}, expected uint8, uint16 or float32",
            output.name,
            output.stored_dtype.name()
        ));
    }
    if let Some(fill) =
        affine.fill.iter().find(|fill| !fill.is_finite() || is_unfit(f64::from(**fill), output.stored_dtype))
    {
        return wrong(format!(
            "fill={fill} does not fit `{}`, whose values are {}",
            output.name,
            output.stored_dtype.name()
        ));
    }
    Ok(())
}
