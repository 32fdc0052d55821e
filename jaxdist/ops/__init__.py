"""Operations on one device's arrays: attention, matrix products, rotations. They name no mesh axis."""
